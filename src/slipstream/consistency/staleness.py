"""Workers that run ahead of each other: by a bound, or as they like."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from slipstream.consistency.protocol import Closed, Progress
from slipstream.errors import ConfigError, FrameRefused
from slipstream.types import Rank


@dataclass(frozen=True, slots=True)
class BoundedStaleness:
    """Nobody begins clock c before everybody's gradients up to clock c - ``bound`` - 1 have been
    applied (SSP); with bound 0 that is rounds.

    A holder closes update t when all workers have pushed clock t. What faster workers have pushed
    meanwhile, of up to ``bound`` later clocks, is part of it. When a slow one leaves, updates that
    only it held up close with nothing in them.

    ``rate_factor`` multiplies learning rates: what is stable in rounds may not be here.
    """

    bound: int
    rate_factor: float = 1.0

    def __post_init__(self) -> None:
        if type(self.bound) is not int or self.bound < 0:
            raise ConfigError(f"a staleness bound of {self.bound!r}: give 0 or more")
        if not isinstance(self.rate_factor, int | float) or not 0 < self.rate_factor <= 1:
            raise ConfigError(f"rate_factor={self.rate_factor!r}: give a number up to 1, above 0")

    @property
    def lockstep(self) -> bool:
        return False

    @property
    def alone(self) -> bool:
        return False

    @property
    def agreed(self) -> bool:
        return False

    @property
    def under_way(self) -> int:
        return self.bound + 1

    def among(self, workers: int) -> BoundedStaleness:
        return self

    def may_start(self, progress: Progress) -> bool:
        return progress.round <= progress.committed + self.bound

    def follows(self, *, seen: int, begun: int, result: int) -> bool:
        return seen == result < begun

    def book(self, workers: int) -> Folding:
        return Folding(self.bound, dict.fromkeys(range(workers), 0))

    def rate(self, staleness: int) -> float:
        return self.rate_factor


@dataclass(slots=True)
class Folding:
    """Everything that has come is folded in when the slowest worker has pushed the open clock."""

    bound: int
    clocks: dict[Rank, int]  # contributions made, by those who are there
    round: int = 0
    _waiting: list[tuple[int, Rank]] = field(default_factory=list)

    def arrive(self, rank: Rank, clock: int) -> bool:
        at = self.clocks.get(rank)
        if clock != at or clock > self.round + self.bound:
            raise FrameRefused(
                f"clock {clock} of rank {rank}, who is at {at}; {self.round} is open"
            )
        self.clocks[rank] += 1
        self._waiting.append((clock, rank))
        return True

    def retire(self, rank: Rank) -> None:
        self.clocks.pop(rank, None)

    def close(self) -> Closed | None:
        waited_for = self.clocks and min(self.clocks.values()) <= self.round
        if waited_for or not (self.clocks or self._waiting):
            return None
        made, self._waiting = tuple(sorted(self._waiting)), []
        self.round += 1
        members = {rank for _, rank in made} | self.clocks.keys()
        return Closed(made, len(members), tuple(sorted(self.clocks)))


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """Every gradient is applied when it arrives; its sender goes on with what there is then.

    ``by_staleness``: a gradient that is k updates old counts 1/k. ``ramp_up``: worker k of n begins
    after k/n of so many updates, so that staleness grows slowly.
    """

    by_staleness: bool = False
    ramp_up: int = 0

    def __post_init__(self) -> None:
        if type(self.ramp_up) is not int or self.ramp_up < 0:
            raise ConfigError(f"ramp_up={self.ramp_up!r}: give a number of updates, 0 or more")

    @property
    def lockstep(self) -> bool:
        return False

    @property
    def alone(self) -> bool:
        return True

    @property
    def agreed(self) -> bool:
        return False

    @property
    def under_way(self) -> int:
        return 1

    def among(self, workers: int) -> Asynchronous:
        return self

    def may_start(self, progress: Progress) -> bool:
        return progress.round <= progress.committed

    def follows(self, *, seen: int, begun: int, result: int) -> bool:
        return seen <= result

    def book(self, workers: int) -> AsTheyCome:
        return AsTheyCome([rank * self.ramp_up // workers for rank in range(workers)])

    def rate(self, staleness: int) -> float:
        return 1.0 / max(1, staleness) if self.by_staleness else 1.0


@dataclass(slots=True)
class AsTheyCome:
    """Each contribution is an update of its own; who comes before its turn is told to wait."""

    begins_at: list[int]  # by rank: the update before which its gradients do not count
    round: int = 0
    _next: deque[tuple[int, Rank]] = field(default_factory=deque)
    _early: set[Rank] = field(default_factory=set)

    def arrive(self, rank: Rank, clock: int) -> bool:
        if clock > self.round:
            raise FrameRefused(f"a gradient of update {clock}; there have been {self.round}")
        if self.round < self.begins_at[rank]:
            self._early.add(rank)
            return False
        self._next.append((clock, rank))
        return True

    def retire(self, rank: Rank) -> None:
        """Nobody waits for it anyway; but others' turn may not depend on its updates."""
        self.begins_at = [0] * len(self.begins_at)

    def close(self) -> Closed | None:
        made = (self._next.popleft(),) if self._next else ()
        updates = self.round + len(made)
        begun = {rank for rank in self._early if updates >= self.begins_at[rank]}
        if not made and not begun:
            return None
        self.round = max(1, updates)  # a result is always one of some update
        self._early -= begun
        return Closed(made, 1, tuple(sorted(begun.union(rank for _, rank in made))))
