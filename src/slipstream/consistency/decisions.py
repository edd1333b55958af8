"""Decisions of one holder for all: which workers make a round. Pure: time is passed in.

A rule whose holders must agree on the workers of a round has a ``Decider``. Server 0 keeps it, and
sends its decisions to every holder, in order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.consistency.arrivals import Arrivals
from slipstream.types import Rank

KEPT_LATE = 1 << 14  # the last dropped gradients, by round and worker

# Returns how many workers make the next round, from the number of rounds made, the durations in
# seconds of each worker's last steps, and how many workers made the last round.
Reconsider = Callable[[int, Mapping[Rank, Sequence[float]], int], int]


@dataclass(frozen=True, slots=True)
class Made:
    """The decision that these workers make this round."""

    round: int
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Late:
    """The decision that a worker was late: it gets the current weights, those of this round."""

    round: int
    rank: Rank


Decision = Made | Late


@dataclass(slots=True)
class RoundRecord:
    """The counts and times that a job's figures report of its rounds."""

    made: Counter[Rank] = field(default_factory=Counter)  # number of rounds, by worker
    dropped: Counter[Rank] = field(default_factory=Counter)
    late: deque[tuple[int, Rank]] = field(default_factory=lambda: deque(maxlen=KEPT_LATE))
    first: list[tuple[int, int | None]] = field(default_factory=list)  # (from round, N)
    arrivals: Arrivals = field(default_factory=Arrivals)


@dataclass(slots=True)
class HolderReports:
    """Holders' reports that they have their whole part of a worker's gradient."""

    holders: int
    # By worker and holder: the last round for which the holder has its whole part of the gradient.
    _last: dict[Rank, dict[int, int]] = field(default_factory=dict)

    def complete(self, holder: int, rank: Rank, round_: int) -> bool:
        """Enter a report; return True if it is the last one of this gradient.

        A repeated report of a holder changes nothing.
        """
        reported = self._last.setdefault(rank, {})
        if round_ <= reported.get(holder, -1):
            return False
        reported[holder] = round_
        return list(reported.values()).count(round_) == self.holders

    def forget(self, rank: Rank) -> None:
        """Drop the reports about a worker that does not come back."""
        self._last.pop(rank, None)


class Decider(Protocol):
    """The state of a rule's decisions, at the holder that decides.

    ``arrived``, ``retire`` and ``tick`` return new decisions, in the order in which holders must
    get them. Every holder gets every decision.
    """

    @property
    def holders(self) -> int:
        """The number of holders that report arrivals."""
        ...

    @property
    def record(self) -> RoundRecord:
        """The figures of the rounds so far."""
        ...

    @property
    def close_after_s(self) -> float | None:
        """The time after which ``tick`` may close an open round; None if it never does."""
        ...

    def arrived(self, holder: int, rank: Rank, round_: int, now: float) -> list[Decision]:
        """Record that a holder has its part of a worker's gradient; return decisions.

        Raises:
            FrameRefused: The worker cannot have computed this gradient.
        """
        ...

    def is_in(self, rank: Rank) -> bool:
        """Return whether a gradient of this worker has arrived that no round contains yet."""
        ...

    def retire(self, rank: Rank, now: float, *, lost: bool = False) -> list[Decision]:
        """Decide without a worker from now on; a lost one may come back."""
        ...

    def tick(self, now: float) -> list[Decision]:
        """Return the decisions that are due at this time."""
        ...
