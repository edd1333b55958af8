"""Ledgers of rounds, one for each kind of admission."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from slipstream.consistency.protocol import Closed
from slipstream.errors import FrameRefused
from slipstream.types import Rank


@dataclass(slots=True)
class AllLedger:
    """The rounds that every live worker makes; none is more than ``ahead`` rounds ahead."""

    members: set[Rank]
    round: int = 0
    ahead: int = 0
    _arrived: dict[int, set[Rank]] = field(default_factory=dict)

    def arrive(self, rank: Rank, clock: int) -> bool:
        if rank not in self.members:
            raise FrameRefused(f"rank {rank} has left")
        # On a mesh this worker may have pushed `ahead` rounds that are still open here. A peer that
        # has all contributions may have closed these rounds, and begun as many again.
        if not self.round <= clock <= self.round + 1 + 2 * self.ahead:
            raise FrameRefused(f"round {clock} while round {self.round} is open")
        arrived = self._arrived.setdefault(clock, set())
        if rank in arrived:
            raise FrameRefused(f"rank {rank} contributed twice to round {clock}")
        arrived.add(rank)
        return True

    def retire(self, rank: Rank) -> None:
        self.members.discard(rank)

    def close(self) -> Closed | None:
        arrived = self._arrived.get(self.round, set())
        if not arrived or self.members - arrived:
            return None
        del self._arrived[self.round]
        contributions = tuple((self.round, rank) for rank in sorted(arrived))
        self.round += 1
        return Closed(contributions, len(contributions))


@dataclass(slots=True)
class DecidedLedger:
    """The rounds of a unit whose workers a ``Decider`` chooses in one place for all holders."""

    round: int = 0
    _arrived: dict[Rank, int] = field(default_factory=dict)  # clock of a worker's contribution
    _decided: tuple[Rank, ...] | None = None

    def arrive(self, rank: Rank, clock: int) -> bool:
        if clock > self.round:
            raise FrameRefused(f"round {clock} while round {self.round} is open")
        if rank in self._arrived:
            raise FrameRefused(f"rank {rank} contributed twice to round {self.round}")
        self._arrived[rank] = clock
        return True

    def retire(self, rank: Rank) -> None:
        """Do nothing: the holder that decides also knows that the worker left."""

    def decide(self, ranks: tuple[Rank, ...]) -> None:
        """Fix the workers of the open round, all of whose contributions have arrived."""
        missing = set(ranks) - self._arrived.keys()
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
        contributions = [(self._arrived.pop(rank), rank) for rank in self._decided]
        contributions.sort(key=lambda each: (-each[0], each[1]))
        closed = Closed(tuple(contributions), len(contributions), self._decided)
        self.round, self._decided = self.round + 1, None
        return closed


@dataclass(slots=True)
class SspLedger:
    """Rounds that close when the slowest worker has pushed the open clock, with all contributions
    that have arrived."""

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
        contributions, self._waiting = tuple(sorted(self._waiting)), []
        self.round += 1
        members = {rank for _, rank in contributions} | self.clocks.keys()
        return Closed(contributions, len(members), tuple(sorted(self.clocks)))


@dataclass(slots=True)
class AsyncLedger:
    """Updates of one contribution each; a worker that starts before its turn has to wait."""

    begins_at: list[int]  # by rank: the first update with which its gradients count
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
        """Let all workers begin now, since ramp-up may wait for updates of the worker that left. No
        round waits for it."""
        self.begins_at = [0] * len(self.begins_at)

    def close(self) -> Closed | None:
        contributions = (self._next.popleft(),) if self._next else ()
        updates = self.round + len(contributions)
        begun = {rank for rank in self._early if updates >= self.begins_at[rank]}
        if not contributions and not begun:
            return None
        self.round = max(1, updates)  # a result always belongs to some update
        self._early -= begun
        audience = tuple(sorted(begun.union(rank for _, rank in contributions)))
        return Closed(contributions, 1, audience, dropped=tuple(sorted(begun)))
