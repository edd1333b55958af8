"""One holder decides for all which workers make a round. Pure: time is passed in.

A worker has arrived when every holder has its part of the worker's gradient. When enough workers
have arrived, they make the round, and every holder gets this decision. A worker that arrives for a
closed round gets the current weights at once. If it is late twice in a row, it gets them when the
next round opens, and begins that round with the other workers; if all steps took equally long, it
would otherwise always be late. Holders get decisions in the order in which they were made, so that
a worker gets the same version of the weights from all of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.consistency.admission import FirstOf
from slipstream.consistency.arrivals import Arrivals
from slipstream.errors import FrameRefused
from slipstream.types import Rank

KEPT_LATE = 1 << 14  # the last gradients that were dropped, by round and worker


@dataclass(frozen=True, slots=True)
class Made:
    """These workers make this round."""

    round: int
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Late:
    """This worker was late: it gets the current weights, those of this round."""

    round: int
    rank: Rank


Decision = Made | Late


@dataclass(slots=True)
class Agreement:
    """The state of the agreement, at the holder that decides."""

    rule: FirstOf
    workers: int
    holders: int
    round: int = 0
    members: set[Rank] = field(default_factory=set)
    left: set[Rank] = field(default_factory=set)  # do not come back
    made: Counter[Rank] = field(default_factory=Counter)  # rounds made, by worker
    dropped: Counter[Rank] = field(default_factory=Counter)
    late: deque[tuple[int, Rank]] = field(default_factory=lambda: deque(maxlen=KEPT_LATE))
    first: list[tuple[int, int | None]] = field(default_factory=list)  # (from round, N)
    arrivals: Arrivals = field(default_factory=Arrivals)
    # Called after every round; returns the rule of the next.
    reconsider: Callable[[Agreement], FirstOf] = lambda agreement: agreement.rule
    # By worker and holder: the last round for which the holder has its whole part of the gradient.
    _reported: dict[Rank, dict[int, int]] = field(default_factory=dict)
    _in: set[Rank] = field(default_factory=set)
    _held: dict[Rank, float] = field(default_factory=dict)  # since when; until a round opens
    _round_s: float = 0.0  # the last one's duration
    _dropped_last: dict[Rank, bool] = field(default_factory=dict)
    _opened_at: float | None = None

    def __post_init__(self) -> None:
        self.members = set(range(self.workers))
        self.first = [(0, self.rule.first)]

    def arrived(self, holder: int, rank: Rank, round_: int, now: float) -> list[Decision]:
        """A holder has its whole part of a worker's gradient for a round.

        Returns:
            The new decisions. A repeated report of a holder changes nothing.

        Raises:
            FrameRefused: The round is not open yet.
        """
        if rank in self.left:
            return []  # after the worker had left
        if round_ > self.round or rank >= self.workers:
            raise FrameRefused(f"rank {rank} is in round {round_}, but {self.round} is open")
        self.members.add(rank)  # it may have counted as lost
        if self._opened_at is None:
            self._open(now)  # the start of the first steps is unknown
        reported = self._reported.setdefault(rank, {})
        if round_ <= reported.get(holder, -1):
            return []
        reported[holder] = round_
        if list(reported.values()).count(round_) < self.holders:
            return []
        self.arrivals.arrived(rank, round_, now)
        if round_ == self.round:
            self._in.add(rank)
            return self.tick(now)
        again = self._dropped_last.get(rank) is True
        self.dropped[rank] += 1
        self.late.append((round_, rank))
        self._dropped_last[rank] = True
        if again and self._enough_without({*self._held, rank}):
            self._held[rank] = now
            return []
        self.arrivals.served(rank, now)
        return [Late(self.round, rank)]

    def is_in(self, rank: Rank) -> bool:
        """Whether this worker's gradient for the open round has arrived."""
        return rank in self._in

    def retire(self, rank: Rank, now: float, *, lost: bool = False) -> list[Decision]:
        """A worker has left, or counts as lost; rounds close without it."""
        self.members.discard(rank)
        if not lost:
            self.left.add(rank)
            self._reported.pop(rank, None)
        return self.tick(now)

    def _enough_without(self, held: set[Rank]) -> bool:
        """Whether the workers that are not held can make a round."""
        there = (self.members | self._in | held) - self.left
        return len(there - held) >= min(self.rule.first or self.workers, len(there))

    def _serve_held(self, now: float) -> list[Decision]:
        held = sorted(self._held.keys() - self.left)  # also those lost since
        self._held.clear()
        for rank in held:
            self.arrivals.served(rank, now)
        return [Late(self.round, rank) for rank in held]

    def tick(self, now: float) -> list[Decision]:
        """Close the open round if it has enough gradients, or if its time is over."""
        closed = self._close(now)
        # Other workers may have paused: do not hold a worker for longer than about two rounds.
        tired = any(now - since > 2 * self._round_s for since in self._held.values())
        if closed or tired or not self._enough_without(set(self._held)):
            closed += self._serve_held(now)
        return closed

    def _close(self, now: float) -> list[Decision]:
        members = len(self.members | self._in)
        open_s = now - (now if self._opened_at is None else self._opened_at)
        if not self._in or not self.rule.closes(came=len(self._in), members=members, open_s=open_s):
            return []
        made = Made(self.round, tuple(sorted(self._in)))
        self.made.update(self._in)
        for rank in self._in:
            self.arrivals.served(rank, now)
            self._dropped_last[rank] = False
        self._in.clear()
        self.round += 1
        self._open(now)
        self.rule = self.reconsider(self)
        if self.rule.first != self.first[-1][1]:
            self.first.append((self.round, self.rule.first))
        return [made]

    def _open(self, now: float) -> None:
        if self._opened_at is not None:
            self._round_s = now - self._opened_at
        self._opened_at = now
        self.arrivals.opened(self.round, now)
