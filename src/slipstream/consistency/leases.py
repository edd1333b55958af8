"""Batches dealt one at a time from the whole set, so that each counts once an epoch. Pure.

A batch belongs to whoever leases it until its gradient has counted; one whose gradient was dropped
goes back, and is dealt before all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from slipstream.types import Rank


@dataclass(frozen=True, slots=True, order=True)
class Batch:
    """The ``number``-th batch of an epoch; what is in it, everybody works out alike."""

    epoch: int
    number: int


@dataclass(slots=True)
class Leases:
    """Epochs of ``batches`` each, one after the other without a gap."""

    batches: int
    counted: int = 0
    _next: int = 0
    _returned: deque[Batch] = field(default_factory=deque)
    _leased: dict[Rank, deque[Batch]] = field(default_factory=dict)

    def lease(self, rank: Rank) -> Batch:
        if self._returned:
            batch = self._returned.popleft()
        else:
            batch = Batch(*divmod(self._next, self.batches))
            self._next += 1
        self._leased.setdefault(rank, deque()).append(batch)
        return batch

    def settle(self, rank: Rank, *, counts: bool) -> None:
        """The gradient of a worker's oldest batch has arrived; who leases none has its own data."""
        leased = self._leased.get(rank)
        if not leased:
            return
        batch = leased.popleft()
        if counts:
            self.counted += 1
        else:
            self._return([batch])

    def first_of(self, rank: Rank, number: int) -> list[Batch]:
        """The oldest that a worker has leased, at most so many."""
        return list(self._leased.get(rank, deque()))[: max(0, number)]

    def deal_again(self, batches: Iterable[Batch]) -> None:
        """Their gradients had counted, and are lost."""
        again = list(batches)
        self.counted -= len(again)
        self._return(again)

    def give_back(self, rank: Rank, number: int) -> None:
        """A worker will not train on the last so many that it leased."""
        leased = self._leased.get(rank, deque())
        self._return([leased.pop() for _ in range(min(number, len(leased)))])

    def forfeit(self, rank: Rank, *, keeping: int) -> None:
        """A worker has left: others get what it had, but for the oldest ones, ``keeping`` of them,
        whose gradients are in and may yet count."""
        leased = self._leased.pop(rank, deque())
        self._leased[rank] = deque(list(leased)[:keeping])
        self._return(list(leased)[keeping:])

    def _return(self, batches: Iterable[Batch]) -> None:
        self._returned = deque(sorted([*self._returned, *batches]))
