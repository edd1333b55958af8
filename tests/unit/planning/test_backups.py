"""The replay against a run event by event; the split it finds against the best on new delays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.planning.backups import (
    Adapting,
    Floats,
    Split,
    assumed_iterations,
    best_split,
    compare_splits,
    fit_iterations,
    plan_backups,
    replay,
    resample,
)

Step = Callable[[int, float], float]  # a worker and the moment it begins: how long it takes
World = Callable[[np.random.Generator], Step]


def serve(
    step: Step, workers: int, first: int, rounds: int, adapting: Adapting | None = None
) -> tuple[list[float], int, dict[int, list[float]], int]:
    """Moments at which rounds close, gradients dropped, durations, and the last ``first``."""
    busy: list[tuple[float, int, int]] = []
    durations: dict[int, list[float]] = {worker: [] for worker in range(workers)}
    begun: dict[int, float] = {}
    made: list[int] = []
    closed: list[float] = []
    dropped = 0

    def begin(worker: int, moment: float) -> None:
        begun[worker] = step(worker, moment)
        heappush(busy, (moment + begun[worker], worker, len(closed)))

    for worker in range(workers):
        begin(worker, 0.0)
    while len(closed) < rounds:
        moment, worker, begun_for = heappop(busy)
        durations[worker].append(begun[worker])
        if begun_for < len(closed):
            dropped += 1
            begin(worker, moment)
            continue
        made.append(worker)
        if len(made) == first:
            closed.append(moment)
            if adapting is not None:
                first = adapting.first_after(len(closed), durations, first)
            for ready in made:
                begin(ready, moment)
            made = []
    return closed, dropped, durations, first


def in_turn(steps: Floats) -> Step:
    taken = [iter(row) for row in steps.tolist()]
    return lambda worker, moment: next(taken[worker])


def recording(*workers: Sequence[float]) -> dict[int, Sequence[float]]:
    return dict(enumerate(workers))


def round_times(splits: Sequence[Split]) -> list[float]:
    return [split.round_s for split in splits]


# ---- by hand


def test_equal_steps_take_as_long_whoever_is_waited_for() -> None:
    splits = compare_splits(recording(*[[0.25]] * 6))
    assert round_times(splits) == pytest.approx([0.25] * 6)
    assert best_split(splits) is splits[-1]
    assert splits[-1].relative_time == 1
    assert splits[-1].dropped_share == 0


def test_one_worker_five_times_as_slow() -> None:
    splits = compare_splits(recording(*[[1.0]] * 4, [5.0]))
    assert round_times(splits) == pytest.approx([1, 1, 1, 1, 5])
    best = best_split(splits)
    assert (best.first, best.backup) == (4, 1)
    # 1 + 20/4 iterations of 1 s, against 1 + 20/5 of 5 s
    assert best.relative_time == pytest.approx(6 / 25)
    # In five rounds the four give 20 gradients, the fifth one that is late.
    assert best.dropped_share == pytest.approx(1 / 21, rel=0.02)


def test_a_late_worker_is_still_busy_when_the_next_round_opens() -> None:
    steps = np.array([[1.0, 3.0, 9.0], [3.0, 0.5, 9.0]])
    # One worker makes a round. Worker 0 closes round 0 at 1.0 and begins a step that ends at 4.0.
    # Worker 1 is late at 3.0, begins its short step only then, and closes round 1 at 3.5.
    round_s, dropped = replay(steps)
    assert round_s.tolist() == [3.5 / 2, 6.0 / 2]
    assert dropped.tolist() == [1 / 2, 0]
    # Had both begun together, rounds of 1.0 and 0.5 would have been read off.
    assert np.sort(steps[:, :2], axis=0)[0].mean() == 0.75


def test_of_equally_fast_splits_the_one_that_drops_least() -> None:
    splits = compare_splits(recording([1.0], [1.0], [1.0]), lambda first: 100)
    assert [split.relative_time for split in splits] == [1, 1, 1]
    assert best_split(splits).first == 3


def test_workers_need_not_be_numbered_from_0_or_have_as_many_steps() -> None:
    splits = compare_splits({7: [2.0], 3: [1.0, 1.0, 1.0]})
    assert round_times(splits) == pytest.approx([1, 2])


# ---- the replay as a whole

SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.integers(2, 7), st.integers(1, 40), st.sampled_from([0.1, 0.5, 1.0, 3.0]))
def test_the_replay_is_what_serving_event_by_event_gives(
    seed: int, workers: int, rounds: int, sigma: float
) -> None:
    steps = np.random.default_rng(seed).lognormal(0, sigma, (workers, rounds + 1))
    round_s, dropped_a_round = replay(steps)
    for first in range(1, workers + 1):
        closed, dropped, _, _ = serve(in_turn(steps), workers, first, rounds)
        assert round_s[first - 1] == pytest.approx(closed[-1] / rounds)
        assert dropped_a_round[first - 1] == pytest.approx(dropped / rounds)


@given(st.data(), st.integers(2, 5), st.integers(2, 12))
def test_waiting_for_more_never_makes_a_round_shorter(
    data: st.DataObject, workers: int, columns: int
) -> None:
    durations = st.floats(-3, 3).map(lambda exponent: 10**exponent)
    row = st.lists(durations, min_size=columns, max_size=columns)
    steps = np.array(data.draw(st.lists(row, min_size=workers, max_size=workers)))
    round_s, _ = replay(steps)
    assert (np.diff(round_s) >= -1e-9 * round_s[-1]).all()


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=9))
def test_when_nobody_varies_the_fastest_make_every_round(seconds: list[float]) -> None:
    splits = compare_splits(recording(*[[step] for step in seconds]), rounds=50)
    assert round_times(splits) == pytest.approx(sorted(seconds))


@given(SEEDS, st.integers(0, 5))
def test_the_seed_decides(seed: int, other: int) -> None:
    steps = np.random.default_rng(seed).lognormal(0, 1, (4, 30)).tolist()
    splits = compare_splits(recording(*steps), rounds=60, seed=other)
    assert splits == compare_splits(recording(*steps), rounds=60, seed=other)
    assert splits != compare_splits(recording(*steps), rounds=60, seed=other + 1)
    assert splits[-1].relative_time == 1


def test_resampling_keeps_neighbours_and_moments_together() -> None:
    short, long = np.arange(100.0), np.arange(200.0)
    rows = resample([short, long], 1000, np.random.default_rng(3))
    assert rows.shape == (2, 1000)
    jumps = np.flatnonzero((np.diff(rows[0]) % 100) != 1)
    assert set((jumps + 1) % 50) == {0}
    assert np.abs(rows[1][::50] / 2 - rows[0][::50]).max() < 1


# ---- iterations to converge


def test_the_assumed_shape_is_that_of_fig_5() -> None:
    needed = assumed_iterations(100)
    assert needed(50) / needed(100) == pytest.approx(137.5 / 76.2, rel=0.01)


def test_points_on_the_curve_give_the_curve() -> None:
    needed = fit_iterations([(4, 1200), (8, 700), (16, 450)])
    assert needed(2) == pytest.approx(2200)
    assert needed(1000) == pytest.approx(204)


@pytest.mark.parametrize(
    ("points", "at_1", "at_100"),
    [
        ([(4, 700), (8, 900)], 800, 800),  # more workers, more iterations: noise
        ([(2, 1000), (4, 100)], 1680, 16.8),  # better than in proportion: noise, too
    ],
)
def test_noise_does_not_turn_the_curve_round(
    points: list[tuple[int, float]], at_1: float, at_100: float
) -> None:
    needed = fit_iterations(points)
    assert needed(1) == pytest.approx(at_1)
    assert needed(100) == pytest.approx(at_100)


def test_given_iterations_decide() -> None:
    durations = recording([1.0], [2.0])
    assert best_split(compare_splits(durations, lambda first: 100)).first == 1
    assert best_split(compare_splits(durations, [(1, 900), (2, 300)])).first == 2


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([], "iterations at 0 points"),
        ([(4, 100)], "iterations at 1 point fix no curve"),
        ([(4, 100), (4, 120)], "two different N"),
        ([(0, 100), (4, 120)], "iterations 0:100"),
        ([(2, -5), (4, 120)], "iterations 2:-5"),
    ],
)
def test_points_that_fix_no_curve(points: list[tuple[int, float]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fit_iterations(points)


@pytest.mark.parametrize(
    ("durations", "says"),
    [
        ({}, "durations of 0 workers"),
        ({0: [1.0]}, "durations of 1 worker:"),
        ({0: [1.0], 1: []}, "worker 1 has no recorded step"),
        ({0: [1.0], 1: [1.0, 0.0]}, "worker 1, step 1: a duration of 0.0 s"),
        ({0: [float("nan")], 1: [1.0]}, "worker 0, step 0"),
    ],
)
def test_durations_that_cannot_be(durations: dict[int, list[float]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compare_splits(durations)


def test_no_rounds() -> None:
    with pytest.raises(ConfigError, match="rounds=0"):
        compare_splits(recording([1.0], [1.0]), rounds=0)


def test_the_public_name() -> None:
    assert plan_backups is compare_splits


# ---- the split it finds, on delays it has not seen

PERIOD_S = 40.0
PERIODS = 5000


def lognormal(sigma: float, slow_worker: float = 1.0) -> World:
    def world(random: np.random.Generator) -> Step:
        drawn = cycle(random.lognormal(0, sigma, 200_000).tolist())
        return lambda worker, moment: next(drawn) * (slow_worker if worker == 0 else 1.0)

    return world


def slow_periods(share: float, *, together: bool = False) -> World:
    """Four times as slow for this share of the time: each worker by itself, or all at once."""

    def world(random: np.random.Generator) -> Step:
        drawn = cycle(random.lognormal(0, 0.3, 200_000).tolist())
        is_slow = random.random((1 if together else 16, PERIODS)) < share

        def step(worker: int, moment: float) -> float:
            whose = 0 if together else worker
            return next(drawn) * (4 if is_slow[whose, int(moment / PERIOD_S) % PERIODS] else 1)

        return step

    return world


def true_times(world: World, workers: int, rounds: int = 2500) -> Floats:
    """To converge, for every split, event by event on fresh delays."""
    return np.array(
        [
            serve(world(np.random.default_rng(1000)), workers, first, rounds)[0][-1]
            * assumed_iterations(workers)(first)
            for first in range(1, workers + 1)
        ]
    )


def regret(truth: Floats, first: int) -> float:
    return float(truth[first - 1] / truth.min() - 1)


def by_order_statistics(durations: dict[int, list[float]]) -> int:
    """The paper's estimate, from a recording of rounds that waited for all."""
    workers = len(durations)
    mean_arrival = np.sort(np.array(list(durations.values())), axis=0).mean(axis=1)
    needed = [assumed_iterations(workers)(first) for first in range(1, workers + 1)]
    return int(np.argmin(mean_arrival * needed)) + 1


CASES = {
    **{f"sigma {sigma}": (lognormal(sigma), 150) for sigma in (0.3, 0.5, 0.8, 1.0)},
    "one slow worker": (lognormal(0.3, slow_worker=5), 150),
    "slow periods": (slow_periods(0.1), 800),
    "all slow at once": (slow_periods(0.3, together=True), 800),
}


@pytest.mark.parametrize("workers", [8, 16])
@pytest.mark.parametrize("case", CASES)
def test_within_5_percent_of_the_best_on_delays_it_has_not_seen(case: str, workers: int) -> None:
    world, recorded_rounds = CASES[case]
    truth = true_times(world, workers)
    for seed, waited_for in enumerate([workers, workers - 2]):
        fresh = world(np.random.default_rng(seed))
        _, _, durations, _ = serve(fresh, workers, waited_for, recorded_rounds)
        chosen = best_split(compare_splits(durations))
        assert regret(truth, chosen.first) <= 0.05


def test_a_longer_replay_does_not_lose_what_slows_all_at_once() -> None:
    world, recorded_rounds = CASES["all slow at once"]
    _, _, durations, _ = serve(world(np.random.default_rng(0)), 16, 14, recorded_rounds)
    chosen = best_split(compare_splits(durations, rounds=6000))
    assert regret(true_times(world, 16), chosen.first) <= 0.05


def test_order_statistics_would_not_do() -> None:
    truth = true_times(lognormal(1.0), 16)
    replayed, ordered = [], []
    for seed in range(8):
        _, _, durations, _ = serve(lognormal(1.0)(np.random.default_rng(seed)), 16, 16, 150)
        replayed.append(regret(truth, best_split(compare_splits(durations)).first))
        ordered.append(regret(truth, by_order_statistics(durations)))
    assert max(replayed) <= 0.05 < np.mean(ordered)


# ---- in a run

MIXED = {worker: [1.0] * 8 for worker in range(4)} | {4: [5.0] * 8}


def test_adapting_looks_every_so_many_rounds() -> None:
    adapting = Adapting(every=10)
    chosen = [adapting.first_after(made, MIXED, 5) for made in range(1, 21)]
    assert chosen == [5] * 9 + [4] + [5] * 9 + [4]


def test_adapting_waits_until_it_knows_everybody() -> None:
    adapting = Adapting(every=1)
    assert adapting.first_after(1, MIXED | {4: [5.0] * 7}, 5) == 5
    assert adapting.first_after(1, {0: [1.0] * 8}, 1) == 1
    assert adapting.first_after(1, {}, 3) == 3


def test_adapting_leaves_alone_what_is_nearly_as_good() -> None:
    durations = {worker: [1.0] * 8 for worker in range(4)} | {4: [1.21] * 8}
    # Four of them: 6 iterations of 1 s; all five: 5 of 1.21 s, 0.8% more.
    assert Adapting(every=1).first_after(1, durations, 5) == 5
    assert Adapting(every=1, gain=0.005).first_after(1, durations, 5) == 4
    assert Adapting(every=1).first_after(1, durations, 4) == 4


def test_adapting_forgets_what_is_long_past() -> None:
    recovered = MIXED | {4: [5.0] * 500 + [1.0] * 256}
    assert Adapting(every=1).first_after(1, recovered, 4) == 5


@pytest.mark.parametrize("begins_with", [1, 5, 8])
def test_adapting_ends_near_the_best(begins_with: int) -> None:
    truth = true_times(lognormal(0.8), 8)
    step = lognormal(0.8)(np.random.default_rng(5))
    _, _, _, first = serve(step, 8, begins_with, 500, Adapting())
    assert regret(truth, first) <= 0.05


@pytest.mark.parametrize(
    "options", [{"every": 0}, {"gain": -0.1}, {"rounds": 0}, {"recent": 0}, {"least_steps": 0}]
)
def test_adapting_by_numbers_that_make_no_sense(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name}="):
        Adapting(**options)  # type: ignore[arg-type]
