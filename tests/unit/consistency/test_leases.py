"""Batches dealt from the whole set: each counts once an epoch."""

from collections import Counter, defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.consistency.leases import Batch, Leases

RANKS = st.integers(0, 4)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["lease", "counts", "dropped", "returned", "forfeit"]), RANKS),
    max_size=120,
)


@given(st.integers(1, 7), EVENTS)
def test_every_batch_counts_once_whoever_is_dropped_or_leaves(
    batches: int, events: list[tuple[str, int]]
) -> None:
    leases = Leases(batches)
    out: dict[int, deque[Batch]] = defaultdict(deque)  # by worker
    counted: Counter[Batch] = Counter()
    for what, rank in events:
        if what == "lease":
            batch = leases.lease(rank)
            assert batch not in counted
            assert not any(batch in leased for leased in out.values()), "two have it"
            out[rank].append(batch)
        elif what == "returned":
            leases.give_back(rank, 2)
            out[rank] = deque(list(out[rank])[:-2])
        elif what == "forfeit":
            leases.forfeit(rank, keeping=0)
            out.pop(rank, None)
        else:
            leases.finish(rank, counts=what == "counts")
            settled = out[rank].popleft() if out[rank] else None
            if settled is not None and what == "counts":
                counted[settled] += 1
    # Whoever is left finishes the epochs that have begun.
    epochs = 1 + max((batch.epoch for batch in counted), default=0)
    for rank in list(out):
        leases.forfeit(rank, keeping=0)
    while len(done := [b for b in counted if b.epoch < epochs]) < epochs * batches:
        assert sum(counted.values()) <= len(done) + batches, "batches of later epochs come first"
        counted[leases.lease(0)] += 1
        leases.finish(0, counts=True)
    assert set(counted.values()) == {1}
    assert {Batch(e, n) for e in range(epochs) for n in range(batches)} <= counted.keys()
    assert leases.counted == len(counted)


def test_give_back_returns_the_batches_leased_last() -> None:
    leases = Leases(9)
    assert [leases.lease(0).number for _ in range(3)] == [0, 1, 2]
    leases.give_back(0, 1)
    assert leases.first_of(0, 9) == [Batch(0, 0), Batch(0, 1)]
    assert leases.lease(1) == Batch(0, 2)


def test_what_comes_back_is_dealt_first_oldest_first() -> None:
    leases = Leases(3)
    assert [leases.lease(0), leases.lease(1), leases.lease(1)] == [
        Batch(0, 0),
        Batch(0, 1),
        Batch(0, 2),
    ]
    leases.finish(1, counts=False)
    leases.finish(0, counts=False)
    assert [leases.lease(2), leases.lease(2), leases.lease(2)] == [
        Batch(0, 0),
        Batch(0, 1),
        Batch(1, 0),
    ]


def test_a_gradient_belongs_to_the_oldest_batch_that_its_worker_leased() -> None:
    leases = Leases(9)
    leases.lease(0), leases.lease(0)
    leases.finish(0, counts=True)
    leases.finish(0, counts=False)
    assert leases.lease(1) == Batch(0, 1)
    assert leases.counted == 1


def test_who_leases_nothing_settles_nothing() -> None:
    leases = Leases(2)
    leases.finish(3, counts=True)
    leases.forfeit(3, keeping=0)
    assert leases.counted == 0
    assert leases.lease(3) == Batch(0, 0)


def test_what_may_yet_count_is_not_dealt_again() -> None:
    """A worker is given up for lost after its gradient has arrived, and before the round closes."""
    leases = Leases(10)
    lent = [leases.lease(1) for _ in range(3)]
    leases.forfeit(1, keeping=1)
    assert [leases.lease(0), leases.lease(0)] == lent[1:]
    leases.finish(1, counts=True)
    assert leases.counted == 1


def test_what_a_residual_has_counts_with_the_next_gradient_of_its_worker() -> None:
    leases = Leases(10)
    lent = [leases.lease(1) for _ in range(3)]
    leases.defer(1)
    leases.defer(1)
    assert leases.counted == 0
    assert leases.lease(0) == Batch(0, 3), "they are nobody else's"
    leases.finish(1, counts=True)
    assert leases.counted == 3
    assert leases.lease(1) not in lent


@pytest.mark.parametrize("is_in", [False, True])
def test_a_residual_that_is_lost_gives_its_batches_back(is_in: bool) -> None:
    """Unless the gradient that has all of it is in, and may yet count."""
    leases = Leases(10)
    lent = [leases.lease(1) for _ in range(3)]
    leases.defer(1)
    leases.forfeit(1, keeping=is_in)
    again = [leases.lease(0) for _ in range(3)]
    assert again == ([lent[2], Batch(0, 3), Batch(0, 4)] if is_in else lent)
    leases.finish(1, counts=True)
    assert leases.counted == (2 if is_in else 0)
