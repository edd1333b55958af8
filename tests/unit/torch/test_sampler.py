"""Batches that workers lease, against leases that are really dealt."""

from __future__ import annotations

from collections import Counter

import pytest

from slipstream.consistency.leases import Batch, Leases, in_turn
from slipstream.errors import ConfigError
from slipstream.torch.distribute.sampler import LeasedBatches


class Dealer:
    """One worker's server and its steps."""

    def __init__(self, batches: int) -> None:
        self.leases, self.steps = Leases(batches), 0
        self.returned: list[int] = []  # by call

    def lease(self, batches: int, returned: int) -> Batch:
        self.returned.append(returned)
        self.leases.give_back(0, returned)
        return self.leases.lease(0)

    def train(self, *, counts: bool = True) -> None:
        self.steps += 1
        self.leases.finish(0, counts=counts)


def sampler(dealer: Dealer, samples: int = 10, size: int = 3) -> LeasedBatches:
    return LeasedBatches(
        range(samples), size, dealer.lease, lambda: dealer.steps, workers=1, shuffle=True, seed=4
    )


def test_every_sample_comes_once_an_epoch_in_another_order() -> None:
    dealer = Dealer(4)
    batches = sampler(dealer)
    epochs = []
    for _ in range(2):
        seen: list[int] = []
        for batch in batches:
            seen += batch
            dealer.train()
        epochs.append(seen)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]


def test_what_a_broken_off_pass_leased_ahead_is_dealt_again() -> None:
    dealer = Dealer(4)
    batches = sampler(dealer)
    ahead = iter(batches)
    trained = Counter(next(ahead))
    dealer.train()
    next(ahead), next(ahead)  # fetched by a loader, and never trained on
    for batch in batches:
        trained.update(batch)
        dealer.train()
    assert trained == Counter(range(10))


def test_sampler_returns_batches_of_each_broken_off_pass_once() -> None:
    dealer = Dealer(9)
    batches = sampler(dealer, samples=27)
    for _ in range(3):
        ahead = iter(batches)
        next(ahead)
        dealer.train()
        next(ahead), next(ahead)  # fetched by a loader, and never trained on
    assert [number for number in dealer.returned if number] == [2, 2]


def test_sampler_of_a_worker_that_missed_an_epoch_makes_an_empty_pass() -> None:
    """So it makes as many passes as the others."""
    dealt = iter([Batch(0, 0), Batch(2, 1), Batch(2, 2), Batch(3, 0)])
    batches = LeasedBatches(
        range(10), 3, lambda *_: next(dealt), lambda: 0, workers=2, shuffle=True, seed=4
    )
    assert [len(list(batches)) for _ in range(3)] == [1, 0, 2]


def test_a_dropped_gradients_batch_comes_again() -> None:
    dealer = Dealer(4)
    counted: Counter[int] = Counter()
    for number, batch in enumerate(sampler(dealer)):
        dealer.train(counts=number != 1)
        if number != 1:
            counted.update(batch)
    assert counted == Counter(range(10))


@pytest.mark.parametrize(("workers", "batches"), [(2, 5), (3, 9), (4, 2)])
def test_in_lockstep_all_get_equally_many_and_all_are_dealt(workers: int, batches: int) -> None:
    each = -(-batches // workers)
    leases = [in_turn(rank, workers) for rank in range(workers)]
    for epoch in range(3):
        dealt = [lease(batches, 0) for lease in leases for _ in range(each)]
        assert {batch.epoch for batch in dealt} == {epoch}
        assert {batch.number for batch in dealt} == set(range(batches))


@pytest.mark.parametrize("size", [0, 11])
def test_sizes_that_cannot_be_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"batches of {size} from 10 samples"):
        sampler(Dealer(4), size=size)
