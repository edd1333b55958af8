"""Ledgers of rounds, one for each kind of admission."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from slipstream.consistency.protocol import Closed
from slipstream.errors import FrameRefused
from slipstream.types import Rank


@dataclass(slots=True)
class AllLedger:
    """Every live worker makes every round; none is more than ``ahead`` rounds ahead."""

    members: set[Rank]
    round: int = 0
    ahead: int = 0
    _came: dict[int, set[Rank]] = field(default_factory=dict)

    def arrive(self, rank: Rank, clock: int) -> bool:
        if rank not in self.members:
            raise FrameRefused(f"rank {rank} has left")
        # On a mesh this worker may have pushed `ahead` rounds that are still open here. A peer that
        # has all contributions may have closed these rounds, and begun as many again.
        if not self.round <= clock <= self.round + 1 + 2 * self.ahead:
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
class DecidedLedger:
    """The rounds of a unit whose workers a ``Decider`` chooses in one place for all holders."""

    round: int = 0
    _came: dict[Rank, int] = field(default_factory=dict)  # the clock of a worker's contribution
    _decided: tuple[Rank, ...] | None = None

    def arrive(self, rank: Rank, clock: int) -> bool:
        if clock > self.round:
            raise FrameRefused(f"round {clock} while round {self.round} is open")
        if rank in self._came:
            raise FrameRefused(f"rank {rank} contributed twice to round {self.round}")
        self._came[rank] = clock
        return True

    def retire(self, rank: Rank) -> None:
        """Nothing to do: the holder that decides also knows that the worker left."""

    def decide(self, ranks: tuple[Rank, ...]) -> None:
        """Fix the workers of the open round; all their contributions are here."""
        missing = set(ranks) - self._came.keys()
        if missing or not ranks:
            raise FrameRefused(
                f"round {self.round} decided without gradients of {missing or 'any'}"
            )
        self._decided = tuple(sorted(ranks))

    def close(self) -> Closed | None:
        """Close the open round if its workers are decided.

        The newest contributions come first, since a round takes the optimizer's settings of its
        first one.
        """
        if self._decided is None:
            return None
        made = [(self._came.pop(rank), rank) for rank in self._decided]
        made.sort(key=lambda each: (-each[0], each[1]))
        closed = Closed(tuple(made), len(made), self._decided)
        self.round, self._decided = self.round + 1, None
        return closed


@dataclass(slots=True)
class SspLedger:
    """All arrived contributions are folded in when the slowest worker has pushed the open clock."""

    bound: int
    clocks: dict[Rank, int]  # number of contributions of each live worker
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


@dataclass(slots=True)
class AsyncLedger:
    """Each contribution is its own update; a worker that comes before its turn has to wait."""

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
        """No round waits for it; but ramp-up may wait for its updates, so all workers may begin
        now."""
        self.begins_at = [0] * len(self.begins_at)

    def close(self) -> Closed | None:
        made = (self._next.popleft(),) if self._next else ()
        updates = self.round + len(made)
        begun = {rank for rank in self._early if updates >= self.begins_at[rank]}
        if not made and not begun:
            return None
        self.round = max(1, updates)  # a result always belongs to some update
        self._early -= begun
        audience = tuple(sorted(begun.union(rank for _, rank in made)))
        return Closed(made, 1, audience, dropped=tuple(sorted(begun)))
