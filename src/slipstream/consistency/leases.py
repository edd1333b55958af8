"""Leases of batches, one at a time from the whole data set; each counts once per epoch. Pure.

A batch belongs to the worker that leases it until its gradient has counted. A batch whose gradient
was dropped is returned, and is assigned before all others.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from slipstream.types import Rank


@dataclass(frozen=True, slots=True, order=True)
class Batch:
    """The ``number``-th batch of an epoch; every worker computes its content from these."""

    epoch: int
    number: int


@dataclass(slots=True)
class Leases:
    """Epochs of ``batches`` batches each, one after the other without a gap."""

    batches: int
    counted: int = 0
    _next: int = 0
    _returned: deque[Batch] = field(default_factory=deque)
    _leased: dict[Rank, deque[Batch]] = field(default_factory=dict)
    _deferred: Counter[Rank] = field(default_factory=Counter)  # of the oldest leases, how many

    def lease(self, rank: Rank) -> Batch:
        if self._returned:
            batch = self._returned.popleft()
        else:
            batch = Batch(*divmod(self._next, self.batches))
            self._next += 1
        self._leased.setdefault(rank, deque()).append(batch)
        return batch

    def finish(self, rank: Rank, *, counts: bool) -> None:
        """End the lease of a worker's oldest batch, whose gradient has arrived. A worker without a
        lease uses its own data.

        If the gradient counts, so do the deferred batches, which are part of it.
        """
        leased = self._leased.get(rank)
        if not leased:
            return
        if not counts:
            self._return([leased.popleft()])
            return
        for _ in range(min(self._deferred.pop(rank, 0) + 1, len(leased))):
            leased.popleft()
            self.counted += 1

    def defer(self, rank: Rank) -> None:
        """Defer a worker's oldest batch, whose gradient was dropped and has returned to its
        residual. It counts with the next gradient, unless the worker leaves before that."""
        if self._deferred[rank] < len(self._leased.get(rank, deque())):
            self._deferred[rank] += 1

    def first_of(self, rank: Rank, number: int) -> list[Batch]:
        """Return the oldest batches that a worker has leased, at most ``number``."""
        return list(self._leased.get(rank, deque()))[: max(0, number)]

    def deal_again(self, batches: Iterable[Batch]) -> None:
        """Assign batches again whose gradients had counted, but were lost."""
        again = list(batches)
        self.counted -= len(again)
        self._return(again)

    def give_back(self, rank: Rank, number: int) -> None:
        """Return the last ``number`` batches that a worker leased, and will not train on."""
        leased = self._leased.get(rank, deque())
        self._return([leased.pop() for _ in range(min(number, len(leased)))])

    def forfeit(self, rank: Rank, *, keeping: int) -> None:
        """Return the batches of a worker that has left, except the oldest ``keeping``, whose
        gradients have arrived and may still count."""
        leased = self._leased.pop(rank, deque())
        kept = keeping + self._deferred[rank] if keeping else 0
        self._leased[rank] = deque(list(leased)[:kept])
        self._return(list(leased)[kept:])
        if not keeping:
            del self._deferred[rank]

    def _return(self, batches: Iterable[Batch]) -> None:
        self._returned = deque(sorted([*self._returned, *batches]))


def in_turn(rank: int, workers: int, first: int = 0) -> Callable[[int, int], Batch]:
    """Batches where every gradient counts: each worker takes every n-th, and all equally many.

    If the number is not divisible, the first batches of an epoch are dealt again at its end.
    ``first`` is the number of batches that a worker missed before it came back.
    """
    turns = itertools.count(first)

    def lease(batches: int, _returned: int) -> Batch:
        epoch, turn = divmod(next(turns), -(-batches // workers))
        return Batch(epoch, (turn * workers + rank) % batches)

    return lease
