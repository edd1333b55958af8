"""Ledgers of workers that run ahead of each other."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.consistency import (
    Asynchronous,
    ByAge,
    Closed,
    Consistency,
    Constant,
    Lag,
    Progress,
    StaleSynchronous,
)
from slipstream.consistency.ledgers import AsyncLedger, SspLedger
from slipstream.errors import ConfigError, FrameRefused


@given(st.integers(0, 9), st.integers(0, 1 << 40), st.integers(-12, 12))
def test_nobody_begins_a_clock_more_than_the_bound_ahead(bound: int, at: int, ahead: int) -> None:
    rule = Consistency(StaleSynchronous(), Lag(bound))
    assert rule.may_start(Progress(at + ahead, committed=at)) is (ahead <= bound)


def test_results_are_seen_one_after_the_other() -> None:
    rule = Consistency(StaleSynchronous(), Lag(2))
    assert rule.follows(seen=3, begun=5, result=3)
    assert not rule.follows(seen=3, begun=5, result=4)
    assert not rule.follows(seen=3, begun=5, result=2)


@pytest.mark.parametrize("bound", [-1, 1.5, True, None])
def test_bounds_that_make_no_sense_are_refused(bound: object) -> None:
    with pytest.raises(ConfigError, match="staleness bound"):
        Lag(bound)  # type: ignore[arg-type]


@given(
    bound=st.integers(0, 4),
    workers=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    leaves=st.floats(0, 0.1),
)
def test_every_contribution_is_folded_in_once(
    bound: int, workers: int, seed: int, leaves: float
) -> None:
    book, chance = Consistency(StaleSynchronous(), Lag(bound)).ledger(workers), random.Random(seed)
    here = dict.fromkeys(range(workers), 0)  # clocks
    waiting: list[tuple[int, int]] = []
    updates: list[Closed] = []
    for _ in range(100):
        able = [rank for rank, clock in here.items() if clock <= len(updates) + bound]
        assert able or not here, "everybody is blocked"
        if not able:
            break
        rank = chance.choice(able)
        if chance.random() < leaves:
            del here[rank]
            book.retire(rank)
        else:
            assert book.arrive(rank, here[rank])
            waiting.append((here[rank], rank))
            here[rank] += 1
        while (closed := book.close()) is not None:
            assert closed.contributions == tuple(sorted(waiting))
            assert closed.divisor == len(here.keys() | {rank for _, rank in waiting})
            assert closed.audience == tuple(sorted(here))
            assert all(clock > len(updates) for clock in here.values())
            waiting = []
            updates.append(closed)
            assert book.round == len(updates)
        assert not waiting or any(clock <= len(updates) for clock in here.values())
    counts = Counter(each for update in updates for each in update.contributions)
    assert set(counts.values()) <= {1}


def test_a_clock_out_of_turn_is_refused() -> None:
    book = Consistency(StaleSynchronous(), Lag(1)).ledger(2)
    assert isinstance(book, SspLedger)
    book.arrive(0, 0)
    with pytest.raises(FrameRefused, match="clock 0 of rank 0, who is at 1"):
        book.arrive(0, 0)
    book.arrive(0, 1)
    with pytest.raises(FrameRefused, match="clock 2 of rank 0, who is at 2; 0 is open"):
        book.arrive(0, 2)
    assert book.close() is None
    book.arrive(1, 0)
    assert book.close() == Closed(((0, 0), (0, 1), (1, 0)), 2, (0, 1))


@given(
    workers=st.integers(1, 5),
    ramp_up=st.integers(0, 20),
    seed=st.integers(0, 2**32),
)
def test_contributions_are_updates_of_their_own_from_their_workers_turn_on(
    workers: int, ramp_up: int, seed: int
) -> None:
    book, chance = Consistency(Asynchronous(ramp_up)).ledger(workers), random.Random(seed)
    free = dict.fromkeys(range(workers), 0)  # those who are not waiting, and what they have
    applied: list[tuple[int, int]] = []  # update and rank
    for _ in range(80):
        assert free, "everybody waits for everybody"
        rank = chance.choice(list(free))
        counts = book.arrive(rank, free.pop(rank))
        assert counts is (book.round >= rank * ramp_up // workers)
        while (closed := book.close()) is not None:
            assert closed.divisor == 1
            assert closed.audience
            applied += [(book.round - 1, rank) for _, rank in closed.contributions]
            for each in closed.audience:
                assert each not in free
                free[each] = book.round
        assert (rank in free) or not counts
    for rank in range(workers):
        first = min((update for update, who in applied if who == rank), default=1 << 30)
        assert first >= rank * ramp_up // workers
    assert len({update for update, _ in applied}) == len(applied)
    assert book.round - len(applied) < workers, "no more empty updates than workers that wait"


def test_who_leaves_before_its_updates_are_made_holds_nobody_up() -> None:
    book = Consistency(Asynchronous(ramp_up=100)).ledger(2)
    assert isinstance(book, AsyncLedger)
    assert not book.arrive(1, 0)
    assert book.close() is None
    book.retire(0)
    assert book.close() == Closed((), 1, (1,), dropped=(1,))
    assert book.arrive(1, 1)
    assert book.close() == Closed(((1, 1),), 1, (1,))


def test_a_gradient_from_the_future_is_refused() -> None:
    with pytest.raises(FrameRefused, match="update 1; there have been 0"):
        Consistency(Asynchronous()).ledger(2).arrive(0, 1)


@pytest.mark.parametrize(("age", "rate"), [(0, 1.0), (1, 1.0), (2, 0.5), (8, 0.125)])
def test_the_rate_falls_with_age_where_that_was_asked_for(age: int, rate: float) -> None:
    assert Consistency(Asynchronous(), damping=ByAge()).rate(age) == rate
    assert (
        Consistency(Asynchronous()).rate(age)
        == Consistency(StaleSynchronous(), Lag(3)).rate(age)
        == 1.0
    )
    assert Consistency(StaleSynchronous(), Lag(3), Constant(0.25)).rate(age) == 0.25


@pytest.mark.parametrize("ramp_up", [-1, 0.5, True])
def test_a_ramp_that_makes_no_sense_is_refused(ramp_up: object) -> None:
    with pytest.raises(ConfigError, match="ramp_up"):
        Asynchronous(ramp_up=ramp_up)  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [0, -1.0, 1.5, "half", None])
def test_a_damping_that_makes_no_sense_is_refused(factor: object) -> None:
    with pytest.raises(ConfigError, match="rate_factor"):
        Constant(factor)  # type: ignore[arg-type]
