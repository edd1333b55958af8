"""Updates of K gradients: whatever arrives when, every gradient is in one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulated_backup_workers import (
    AWAY,
    LEAVES,
    LOST,
    ROUNDS,
    SEEDS,
    SLOW,
    SPECS,
    Reference,
    check_answers,
    conducts,
    makers_of,
    pushes_of,
    run,
)

from slipstream.systems import async_sgd, backup_workers, k_async, push_pull
from slipstream.testing import Conduct, Simulation
from slipstream.transports.wire import Serve


def check_updates(simulation: Simulation) -> list[tuple[int, ...]]:
    """What holds however workers behave; whose gradients each update contains.

    The i-th gradient of a worker is in the i-th update that contains one of its own.
    """
    makers = makers_of(simulation)
    reference = Reference(SPECS)
    versions = [reference.contents()]
    taken: Counter[int] = Counter()
    ages: Counter[int] = Counter()
    for update, ranks in enumerate(makers):
        steps = {rank: simulation.steps[rank][taken[rank]] for rank in ranks}
        newest_first = sorted(ranks, key=lambda rank: (-steps[rank].round, rank))
        reference.update([steps[rank].given for rank in newest_first])
        versions.append(reference.contents())
        taken.update(ranks)
        ages.update(update - step.round for step in steps.values())
    assert taken == Counter({r: len(own) for r, own in enumerate(simulation.steps) if own})
    for (rank, number), pushes in pushes_of(simulation).items():
        step = simulation.steps[rank][number]
        assert step.had == versions[step.round], "weights of another version, or of several"
        assert {(push.round, push.read) for push in pushes} == {(step.round, step.round)}
        assert len(pushes) == len(simulation.plan.chunks)
    assert simulation.held == versions[-1]
    check_answers(simulation)
    check_figures(simulation, taken, ages)
    return makers


def check_figures(simulation: Simulation, taken: Counter[int], ages: Counter[int]) -> None:
    assert simulation.refused == 0
    assert simulation.figures[0].made == taken
    assert not simulation.figures[0].dropped
    assert not any(isinstance(event.body, Serve) for event in simulation.trace)
    for server in simulation.figures:
        assert all(not counts or counts == ages for counts in server.staleness.values())


def check_sizes(simulation: Simulation, makers: Sequence[Sequence[int]], k: int) -> None:
    """K gradients make an update; fewer only where no more workers are left."""
    assert max(map(len, makers)) <= k
    last = {rank: own[-1].round for rank, own in enumerate(simulation.steps) if own}
    for update, ranks in enumerate(makers):
        left = sum(begun >= update for begun in last.values())
        assert len(ranks) >= min(k, left)


@given(
    workers=st.integers(1, 6),
    k=st.integers(1, 6),
    servers=st.integers(1, 3),
    overlap=st.booleans(),
    chunk_bytes=st.sampled_from([256, 768]),
    conduct=conducts(SLOW, AWAY, LEAVES),
    seed=SEEDS,
)
@settings(max_examples=150)
def test_every_update_is_the_mean_of_k_gradients_and_every_gradient_is_in_one(
    workers: int,
    k: int,
    servers: int,
    overlap: bool,
    chunk_bytes: int,
    conduct: Mapping[int, Conduct],
    seed: int,
) -> None:
    k = min(k, workers)
    strategy = k_async(k=k, overlap=overlap, chunk_bytes=chunk_bytes)
    simulation = run(strategy, workers, servers, seed, conduct)
    makers = check_updates(simulation)
    staying = [rank for rank in range(workers) if rank not in conduct or conduct[rank].steps > 4]
    if staying:
        assert len(makers) >= ROUNDS
    if makers:
        check_sizes(simulation, makers, k)


@given(
    workers=st.integers(2, 5),
    k=st.integers(1, 5),
    servers=st.integers(1, 3),
    conduct=conducts(SLOW, LOST),
    seed=SEEDS,
)
@settings(max_examples=100)
def test_gradients_of_workers_that_were_given_up_for_lost_count(
    workers: int, k: int, servers: int, conduct: dict[int, Conduct], seed: int
) -> None:
    conduct.pop(0, None)  # rank 0 gives up others
    simulation = run(k_async(k=min(k, workers), chunk_bytes=768), workers, servers, seed, conduct)
    assert len(check_updates(simulation)) >= ROUNDS


@pytest.mark.parametrize("seed", range(5))
def test_the_others_continue_without_a_worker_that_is_lost_for_good(seed: int) -> None:
    conduct = {2: Conduct(away_at=0.3, given_up=True)}
    simulation = run(k_async(k=3, chunk_bytes=768), 3, 2, seed, conduct, rounds=12)
    makers = makers_of(simulation)
    assert len(makers) >= 12
    assert makers[-1] == (0, 1)
    assert simulation.refused == 0


@given(workers=st.integers(1, 5), servers=st.integers(1, 3), conduct=conducts(SLOW), seed=SEEDS)
@settings(max_examples=60)
def test_with_k_of_all_workers_these_are_the_rounds_of_push_pull(
    workers: int, servers: int, conduct: dict[int, Conduct], seed: int
) -> None:
    plain = run(push_pull(update="server", chunk_bytes=768), workers, servers, seed, conduct)
    updates = run(k_async(k=workers, chunk_bytes=768), workers, servers, seed, conduct)
    assert check_updates(updates) == [tuple(range(workers))] * ROUNDS
    assert updates.held == plain.held
    for got, expected in zip(updates.results, plain.results, strict=True):
        for mine, theirs in zip(got, expected, strict=True):
            # In lockstep a tensor that nobody had a gradient for does not travel.
            for one, other in zip(mine, theirs, strict=True):
                assert other is None or one == other


def test_with_k_1_every_gradient_is_an_update() -> None:
    simulation = run(k_async(k=1, chunk_bytes=768), 3, 2, 4, {1: Conduct(0.1)}, rounds=30)
    makers = check_updates(simulation)
    assert {len(ranks) for ranks in makers} == {1}
    # One worker at one server: the same updates as those of asynchronous SGD, bit for bit.
    plain, single = (run(each, 1, 1, 4) for each in (async_sgd(), k_async(k=1)))
    assert plain.held == single.held


def test_the_gradient_of_a_slow_worker_counts_where_rounds_of_the_first_n_drop_it() -> None:
    conduct = {2: Conduct(away_at=0.0, back_at=50.0)}
    late = run(k_async(k=2, chunk_bytes=768), 3, 2, 5, conduct)
    dropped = run(backup_workers(2, chunk_bytes=768), 3, 2, 5, conduct)
    assert [len(late.steps[2]), len(dropped.steps[2])] == [1, 1]
    assert check_updates(late)[-1] == (2,)
    assert late.figures[0].made[2] == 1
    assert dropped.figures[0].made.get(2, 0) == 0
    assert max(late.figures[0].staleness["first"]) >= ROUNDS


@pytest.mark.parametrize("seed", range(5))
def test_gradients_that_are_whole_at_some_servers_only_wait_for_a_later_update(seed: int) -> None:
    simulation = run(k_async(k=2, chunk_bytes=256), 4, 3, seed, {3: Conduct(0.1)}, rounds=20)
    makers = check_updates(simulation)
    check_sizes(simulation, makers, 2)
    ages = simulation.figures[0].staleness
    assert max(age for counts in ages.values() for age in counts) > 1


def test_equal_seeds_are_equal_runs() -> None:
    first, again, other = (run(k_async(k=2, chunk_bytes=768), 4, 2, seed) for seed in (5, 5, 6))
    assert first == again
    assert first.trace != other.trace
