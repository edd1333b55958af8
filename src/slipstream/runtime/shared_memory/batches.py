"""Batches for learners: each is dealt once per epoch, and again if its gradient was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.consistency.leases import Batch, Leases

Rank = int


@dataclass(slots=True)
class BatchDealer:
    """Each learner's gradients are numbered in the order in which it pushed them."""

    remembered: int = 1_000_000  # batches of a learner that may have to be dealt again
    _leases: Leases | None = None
    _counted: dict[Rank, int] = field(default_factory=dict)  # gradients whose batches count
    _learnt: dict[Rank, dict[int, Batch]] = field(default_factory=dict)  # by number of the gradient

    def begin(self, rank: Rank, pushed: int) -> None:
        """A learner was started; its earlier incarnations have pushed ``pushed`` gradients."""
        self._counted[rank] = pushed

    def obstacle(self, rank: Rank, batches: int) -> str:
        """Why a learner cannot be dealt batches of such an epoch; "" if it can."""
        if self._leases is None:
            self._leases = Leases(batches)
        if self._leases.batches == batches:
            return ""
        return (
            f"rank {rank} asks for batches of another data set: its epochs have {batches}, the "
            f"others' {self._leases.batches}"
        )

    def deal(self, rank: Rank, number: int, returned: int) -> list[Batch]:
        """The next batches for a learner, which gives back the last ``returned``."""
        assert self._leases is not None
        self._leases.give_back(rank, returned)
        return [self._leases.lease(rank) for _ in range(number)]

    def count(self, rank: Rank, pushed: int) -> None:
        """Count the batches whose gradients have been pushed."""
        if self._leases is None:
            return
        first = self._counted.get(rank, 0)
        new = self._leases.first_of(rank, pushed - first)
        for _ in new:
            self._leases.finish(rank, counts=True)
        learnt = self._learnt.setdefault(rank, {})
        learnt.update(enumerate(new, first))
        while len(learnt) > self.remembered:
            del learnt[next(iter(learnt))]
        self._counted[rank] = pushed

    def forfeit(self, rank: Rank) -> None:
        """A learner has ended: the batches that it had leased are dealt to others."""
        if self._leases is not None:
            self._leases.forfeit(rank, keeping=0)

    def undo(self, taken: Sequence[int], let_go: Sequence[int]) -> int:
        """Deal batches again whose gradients are lost: those after the first ``taken`` gradients,
        which the checkpoint contains, up to ``let_go``, which the server has discarded. Returns how
        many.
        """
        lost = []
        for rank, learnt in self._learnt.items():
            numbers = [number for number in learnt if taken[rank] <= number < let_go[rank]]
            lost += [learnt.pop(number) for number in numbers]
        if self._leases is not None:
            self._leases.deal_again(lost)
        return len(lost)
