"""How long steps take and when the k-th gradient of a round comes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.consistency.arrivals import (
    FINEST_S,
    KEPT_ROUNDS,
    KEPT_STEPS,
    PER_DOUBLING,
    Arrivals,
    Histogram,
)

DURATIONS = st.lists(st.floats(0, 1e4), min_size=1, max_size=60)


@given(DURATIONS, st.floats(0.01, 1))
def test_a_quantile_is_right_to_a_fourth_of_a_doubling(
    durations: list[float], share: float
) -> None:
    histogram = Histogram()
    for duration in durations:
        histogram.add(duration)
    exact = max(FINEST_S, np.quantile(durations, share, method="inverted_cdf"))
    got = histogram.quantile(share)
    assert exact <= got * (1 + 1e-9)
    assert got <= exact * 2 ** (1 / PER_DOUBLING) * (1 + 1e-9)


@given(DURATIONS)
def test_pairs_count_every_duration_at_or_below_their_upper_ends(durations: list[float]) -> None:
    histogram = Histogram()
    for duration in durations:
        histogram.add(duration)
    pairs = histogram.as_pairs()
    assert sum(count for _, count in pairs) == len(durations)
    assert [end for end, _ in pairs] == sorted({end for end, _ in pairs})
    below = 0
    for end, count in pairs:
        below += count
        assert below <= sum(duration <= end * (1 + 1e-5) for duration in durations)
        assert below >= sum(duration <= end * (1 - 1e-2) for duration in durations)


def test_nothing_has_no_quantile() -> None:
    assert math.isnan(Histogram().quantile(0.5))


def test_the_kth_of_a_round_is_counted_from_its_opening() -> None:
    arrivals = Arrivals()
    arrivals.opened(0, 10.0)
    for rank, at in ((2, 11.0), (0, 12.0)):
        arrivals.arrived(rank, 0, at)
    arrivals.opened(1, 12.0)
    arrivals.arrived(1, 0, 18.0)  # long after its round was over
    arrivals.arrived(2, 1, 13.0)
    assert sorted(arrivals.kth) == [1, 2, 3]
    assert arrivals.kth[1].counts.total() == 2
    assert arrivals.kth[2].quantile(1) == pytest.approx(2.0, rel=0.19)
    assert arrivals.kth[3].quantile(1) == pytest.approx(8.0, rel=0.19)


def test_a_step_lasts_from_being_served_to_the_arrival_of_its_gradient() -> None:
    arrivals = Arrivals()
    arrivals.opened(0, 0.0)
    arrivals.arrived(0, 0, 1.0)  # nobody knows when it began
    arrivals.served(0, 2.0)
    arrivals.arrived(0, 0, 5.0)
    arrivals.served(0, 5.5)
    arrivals.arrived(0, 0, 6.0)
    assert list(arrivals.durations[0]) == [3.0, 0.5]


def test_what_is_kept_does_not_grow_without_end() -> None:
    arrivals = Arrivals()
    for round_ in range(KEPT_STEPS + 100):
        arrivals.opened(round_, float(round_))
        arrivals.served(0, float(round_))
        arrivals.arrived(0, round_, round_ + 0.5)
    assert len(arrivals.durations[0]) == KEPT_STEPS
    assert len(arrivals.opened_at) == len(arrivals.came) == KEPT_ROUNDS
    arrivals.arrived(1, 3, 1e6)  # too old to be placed
    assert sorted(arrivals.kth) == [1]
