"""Bulk-synchronous rounds: of all workers, or of the first N of N + b."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from slipstream.consistency.protocol import Closed, Progress
from slipstream.errors import ConfigError, FrameRefused
from slipstream.types import Rank


@dataclass(frozen=True, slots=True)
class Rounds:
    """Round t closes when all n workers have contributed to it; nobody starts t+1 before that.

    With ``first``, it closes when so many have, the same ones at every holder; the others'
    gradients of that round are dropped, and they go on with the round that is open then. ``backup``
    says the same by how many are not waited for; where a rule ``adapts``, the number is found in
    the run.
    With ``close_after_s`` a round also closes after that time with whoever has come, if these are
    at least ``min_first``.
    """

    first: int | None = None
    backup: int | None = None
    adapts: bool = False
    close_after_s: float | None = None
    min_first: int = 1

    def __post_init__(self) -> None:
        for name in ("first", "backup", "min_first"):
            if type(value := getattr(self, name)) not in (int, type(None)):
                raise ConfigError(f"{name}={value!r}: give a whole number")
        if self.close_after_s is not None and not isinstance(self.close_after_s, int | float):
            raise ConfigError(f"close_after_s={self.close_after_s!r}: give seconds above 0")
        if self.first is not None and self.backup is not None:
            raise ConfigError("give first or backup, not both")
        if self.first is not None and self.first < 1:
            raise ConfigError(f"first={self.first}: at least one worker must make a round")
        if self.backup is not None and self.backup < 0:
            raise ConfigError(f"backup={self.backup}: give 0 or more")
        if self.close_after_s is not None and not self.close_after_s > 0:
            raise ConfigError(f"close_after_s={self.close_after_s}: give seconds above 0")
        if self.min_first < 1 or (self.first is not None and self.min_first > self.first):
            raise ConfigError(f"min_first={self.min_first}: choose from 1 to first={self.first}")

    @property
    def lockstep(self) -> bool:
        return self.first is None and self.backup is None and not self.adapts

    @property
    def alone(self) -> bool:
        return False

    @property
    def agreed(self) -> bool:
        return not self.lockstep

    @property
    def under_way(self) -> int:
        return 1

    def among(self, workers: int) -> Rounds:
        if self.lockstep:
            return self
        first = workers - (self.backup or 0) if self.first is None else self.first
        if workers == 1:
            first = 1  # a try of the script, alone
        if not 1 <= first <= workers:
            asked = f"backup={self.backup}" if self.first is None else f"first={self.first}"
            allowed = f"1 to {workers}" if self.first is not None else f"0 to {workers - 1}"
            raise ConfigError(f"{asked} with {workers} workers: choose from {allowed}")
        return replace(self, first=first, backup=None, min_first=min(self.min_first, first))

    def may_start(self, progress: Progress) -> bool:
        return progress.round <= progress.committed

    def follows(self, *, seen: int, begun: int, result: int) -> bool:
        if self.lockstep:
            return seen == result < begun
        return seen <= result

    def book(self, workers: int) -> WholeRounds | AgreedRounds:
        return WholeRounds(set(range(workers))) if self.lockstep else AgreedRounds()

    def closes(self, *, came: int, members: int, open_s: float) -> bool:
        """Whether a round is complete that ``came`` of ``members`` have made in this time."""
        if came >= min(self.first or members, members):
            return True
        return (
            self.close_after_s is not None
            and open_s >= self.close_after_s
            and came >= self.min_first
        )

    def rate(self, staleness: int) -> float:
        return 1.0


@dataclass(slots=True)
class WholeRounds:
    """Every worker that is there makes every round."""

    members: set[Rank]
    round: int = 0
    _came: dict[int, set[Rank]] = field(default_factory=dict)

    def arrive(self, rank: Rank, clock: int) -> bool:
        if rank not in self.members:
            raise FrameRefused(f"rank {rank} has left")
        # On a mesh a peer may close round t before this holder does, and be one round ahead.
        if not self.round <= clock <= self.round + 1:
            raise FrameRefused(f"round {clock} while round {self.round} is open")
        came = self._came.setdefault(clock, set())
        if rank in came:
            raise FrameRefused(f"rank {rank} contributed twice to round {clock}")
        came.add(rank)
        return True

    def retire(self, rank: Rank) -> None:
        self.members.discard(rank)

    def close(self) -> Closed | None:
        came = self._came.get(self.round, set())
        if not came or self.members - came:
            return None
        del self._came[self.round]
        made = tuple((self.round, rank) for rank in sorted(came))
        self.round += 1
        return Closed(made, len(made))


@dataclass(slots=True)
class AgreedRounds:
    """Who made a round is decided for all holders in one place; see ``Agreement``."""

    round: int = 0
    _came: set[Rank] = field(default_factory=set)
    _decided: tuple[Rank, ...] | None = None

    def arrive(self, rank: Rank, clock: int) -> bool:
        if clock > self.round:
            raise FrameRefused(f"round {clock} while round {self.round} is open")
        if clock < self.round:
            return False
        if rank in self._came:
            raise FrameRefused(f"rank {rank} contributed twice to round {clock}")
        self._came.add(rank)
        return True

    def retire(self, rank: Rank) -> None:
        """Whoever decides has heard of it too."""

    def decide(self, ranks: tuple[Rank, ...]) -> None:
        """These make the open round; all their contributions are here."""
        missing = set(ranks) - self._came
        if missing or not ranks:
            raise FrameRefused(
                f"round {self.round} decided without gradients of {missing or 'any'}"
            )
        self._decided = tuple(sorted(ranks))

    def close(self) -> Closed | None:
        if self._decided is None:
            return None
        made = tuple((self.round, rank) for rank in self._decided)
        closed = Closed(made, len(made), self._decided)
        self.round, self._decided = self.round + 1, None
        self._came.clear()
        return closed
