"""Trends against a queue with other people's packets in it; the search; transfers themselves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.planning.bandwidth import (
    Available,
    Passive,
    Search,
    Trend,
    Verdict,
    after,
    decided,
    group_medians,
    knee,
    next_rate,
    pct,
    pdt,
    trend,
    vote,
)

MBIT = 125_000.0  # bytes/s
FRAME = 1442
UP, FLAT, UNSURE = Trend.INCREASING, Trend.LEVEL, Trend.AMBIGUOUS

Times = tuple[list[float], list[float]]


def through_queue(
    rate: float, capacity: float, cross: float = 0.0, *, packets: int = 200, seed: int = 0
) -> Times:
    """When a stream is sent, and when it is through a queue that Poisson cross-traffic shares."""
    rng = random.Random(seed)
    sent = [0.1 + index * FRAME / rate for index in range(packets)]
    work: list[tuple[float, int, bool]] = [(at, FRAME, True) for at in sent]
    at = 0.0
    while cross and (at := at + rng.expovariate(cross / FRAME)) < sent[-1]:
        work.append((at, FRAME, False))
    arrived, free_at = [], 0.0
    for at, nbytes, ours in sorted(work):
        free_at = max(free_at, at) + nbytes / capacity
        if ours:
            arrived.append(free_at)
    return sent, arrived


def fleet_vote(rate: float, capacity: float, cross: float) -> Verdict:
    return vote([trend(*through_queue(rate, capacity, cross, seed=seed)) for seed in range(12)])


# ---- one stream, and a fleet


@pytest.mark.parametrize("cross", [0, 10, 20, 30])
def test_a_queue_grows_above_what_is_free_and_not_below(cross: int) -> None:
    free = (40 - cross) * MBIT
    assert fleet_vote(1.25 * free, 40 * MBIT, cross * MBIT) is Verdict.ABOVE
    assert fleet_vote(0.75 * free, 40 * MBIT, cross * MBIT) is Verdict.BELOW


@given(
    offset_s=st.floats(-2e9, 2e9),
    seed=st.integers(0, 10**6),
    skew=st.floats(-0.0005, 0.0005),
)
def test_clocks_that_nobody_has_set_change_nothing(offset_s: float, seed: int, skew: float) -> None:
    # A float of 2e9 s has a grain of 0.2 µs; queues here are of milliseconds.
    for rate, expected in ((44 * MBIT, UP), (36 * MBIT, FLAT)):
        sent, arrived = through_queue(rate, 40 * MBIT, seed=seed)
        assert trend(sent, [offset_s + (1 + skew) * at for at in arrived]) is expected


@given(seed=st.integers(0, 10**6), noise_s=st.floats(0, 0.001))
def test_noise_hides_no_queue_and_makes_none(seed: int, noise_s: float) -> None:
    rng = random.Random(seed)
    for rate, wrong in ((48 * MBIT, Verdict.BELOW), (32 * MBIT, Verdict.ABOVE)):
        sent, arrived = through_queue(rate, 40 * MBIT)
        noisy = [[at + rng.uniform(0, noise_s) for at in arrived] for _ in range(12)]
        assert vote([trend(sent, times) for times in noisy]) is not wrong
    # 48 into 40 is a delay of more than 9 ms at the stream's end: no noise of 1 ms hides that.
    sent, arrived = through_queue(48 * MBIT, 40 * MBIT)
    assert trend(sent, [at + rng.uniform(0, noise_s) for at in arrived]) is UP


def test_skew_alone_would_pass_both_tests_and_is_no_queue() -> None:
    sent = [0.001 * index for index in range(100)]
    arrived = [1.0005 * at for at in sent]
    middles = group_medians([b - a for a, b in zip(sent, arrived, strict=True)])
    assert (pct(middles), pdt(middles)) == (1.0, pytest.approx(1.0))
    assert trend(sent, arrived) is FLAT


@pytest.mark.parametrize(("rate", "expected"), [(44 * MBIT, UP), (36 * MBIT, FLAT)])
def test_packets_that_overtake_or_are_lost_change_nothing(rate: float, expected: Trend) -> None:
    sent, arrived = through_queue(rate, 40 * MBIT)
    late = [at + 4 * FRAME / rate * (index % 10 == 3) for index, at in enumerate(arrived)]
    assert late != sorted(late)
    assert trend(sent, late) is expected
    lost = [None if index % 13 == 5 else at for index, at in enumerate(late)]
    assert trend(sent, lost) is expected


def test_many_losses_are_a_queue_that_overflowed() -> None:
    sent, arrived = through_queue(36 * MBIT, 40 * MBIT)
    assert trend(sent, arrived) is FLAT
    assert trend(sent, [None if index % 6 == 0 else at for index, at in enumerate(arrived)]) is UP
    assert trend(sent, [None] * len(sent)) is UP


def test_a_handful_of_packets_tells_nothing() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert trend(times, [2 * at for at in times]) is UNSURE
    assert trend([*times, 8.0], [2 * at for at in [*times, 8.0]]) is UP


def test_the_two_tests_by_hand() -> None:
    assert group_medians([5, 1, 3, 9, 9, 2, 7, 8, 100]) == [3, 9, 8]
    assert pct([1, 2, 3, 3, 5]) == 0.75
    assert pdt([1, 4, 2, 5]) == pytest.approx(4 / 8)
    assert (pct([2, 2, 2]), pdt([2, 2, 2])) == (0.0, 0.0)
    assert pdt([3, 2, 1]) == -1.0


def stream_of(middles: list[float]) -> Times:
    """One whose groups have these medians."""
    delays = [middle for middle in middles for _ in middles]
    sent = [float(index) for index in range(len(delays))]
    return sent, [at + delay for at, delay in zip(sent, delays, strict=True)]


def test_one_test_may_be_unsure_but_not_contradicted() -> None:
    climb = [float(step) for step in range(10)]
    assert trend(*stream_of(climb)) is UP
    # Down and up again by turns, and one jump: 5 steps of 9 go up, and the way is mostly progress.
    jump = [0, 0.1, 0, 0.1, 0, 9, 8.9, 9, 8.9, 9.0]
    assert (pct(jump), pdt(jump)) == (5 / 9, pytest.approx(9 / 9.8, abs=0.01))
    assert trend(*stream_of(jump)) is UP
    # Only one step goes up: the comparison says level, the difference increasing.
    step = [0, 0, 0, 0, 0, 9, 9, 9, 9, 9.0]
    assert trend(*stream_of(step)) is UNSURE


def test_votes() -> None:
    assert vote([UP] * 6 + [FLAT] * 2) is Verdict.ABOVE
    assert vote([UP] * 2 + [FLAT] * 6) is Verdict.BELOW
    assert vote([UP] * 4 + [FLAT] * 4) is Verdict.GREY
    assert vote([UP] * 4 + [UNSURE] * 4) is Verdict.ABOVE
    assert vote([UP] * 3 + [UNSURE] * 5) is Verdict.GREY
    assert vote([UNSURE]) is Verdict.GREY
    assert vote([UP] * 5 + [FLAT], agreeing=0.9) is Verdict.GREY


@given(st.lists(st.sampled_from(Trend), min_size=1, max_size=12), st.integers(0, 12))
def test_what_is_decided_early_is_what_the_whole_fleet_says(trends: list[Trend], cut: int) -> None:
    if decided(trends[:cut], len(trends)):
        early = trends[:cut] + [UNSURE] * (len(trends) - cut)
        assert vote(early) is vote(trends)


def test_a_clear_fleet_is_decided_early() -> None:
    assert not decided([UP] * 5, 8)
    assert decided([UP] * 6, 8)
    assert decided([FLAT] * 6, 8)
    assert not decided([], 1)


# ---- all rates


def run(search: Search, judge: Callable[[float], Verdict]) -> Search:
    while (rate := next_rate(search)) is not None:
        assert search.low < rate < search.high
        search = after(search, judge(rate))
    return search


def around(low: float, high: float) -> Callable[[float], Verdict]:
    """Free bandwidth that varies within these."""

    def judge(rate: float) -> Verdict:
        if rate > high:
            return Verdict.ABOVE
        return Verdict.BELOW if rate < low else Verdict.GREY

    return judge


@given(free=st.floats(2.0, 999.0), resolution=st.floats(0.01, 0.5))
def test_the_search_closes_in_on_what_is_free(free: float, resolution: float) -> None:
    found = run(Search(1.0, 1000.0, resolution, most_fleets=40), around(free, free))
    assert found.low <= free <= found.high
    assert found.fleets < 40
    if found.grey is None:
        assert found.high - found.low <= resolution * found.high


@given(low=st.floats(2.0, 900.0), width=st.floats(0.0, 0.9), resolution=st.floats(0.01, 0.3))
def test_the_range_ends_just_outside_of_the_grey_region(
    low: float, width: float, resolution: float
) -> None:
    high = low + width * (999.0 - low)
    found = run(Search(1.0, 1000.0, resolution, most_fleets=40), around(low, high))
    near = resolution * found.high
    assert found.low <= high
    assert found.high >= low
    if found.grey is None:  # it was never hit: narrower than the resolution
        assert found.high - found.low <= near
    else:
        assert low <= found.grey[0] <= found.grey[1] <= high
        assert found.low < low
        assert found.high > high
        assert found.grey[0] - found.low <= near
        assert found.high - found.grey[1] <= near


def test_a_limit_is_not_a_finding() -> None:
    found = run(Search(1.0, 1000.0), around(5000, 5000))
    assert (found.high, found.high_seen, found.low_seen) == (1000.0, False, True)
    assert found.low >= 900.0
    found = run(Search(1.0, 1000.0), around(0.1, 0.1))
    assert (found.low, found.low_seen, found.high_seen) == (1.0, False, True)


def test_it_gives_up_where_nothing_settles() -> None:
    found = run(Search(1.0, 1000.0, 0.001, most_fleets=5), around(123, 123))
    assert found.fleets == 5
    assert next_rate(found) is None
    with pytest.raises(ValueError, match="no fleet was due"):
        after(found, Verdict.ABOVE)


def test_a_clear_vote_beyond_the_grey_region_dissolves_it() -> None:
    search = after(Search(0.0, 1000.0), Verdict.GREY)
    assert search.grey == (500.0, 500.0)
    assert next_rate(search) == 750.0
    assert after(search, Verdict.BELOW).grey is None
    assert after(search, Verdict.ABOVE).grey == (500.0, 500.0)
    low_side = search
    for _ in range(4):
        low_side = after(low_side, Verdict.ABOVE)
    assert (low_side.high, next_rate(low_side)) == (531.25, 250.0)
    assert after(low_side, Verdict.ABOVE).grey is None
    assert after(low_side, Verdict.BELOW).grey == (500.0, 500.0)


@pytest.mark.parametrize("cross", [0, 12, 25])
def test_trend_vote_and_search_together_find_what_a_queue_has_free(cross: int) -> None:
    found = run(
        Search(1 * MBIT, 100 * MBIT), lambda rate: fleet_vote(rate, 40 * MBIT, cross * MBIT)
    )
    assert 0.8 * (40 - cross) * MBIT < (found.low + found.high) / 2 < 1.2 * (40 - cross) * MBIT


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: Search(5, 5), "the lower first"),
        (lambda: Search(-1, 5), "the lower first"),
        (lambda: Search(1, math.nan), "the lower first"),
        (lambda: Search(1, 2, resolution=0), "resolution=0"),
        (lambda: Search(1, 2, most_fleets=0), "most_fleets=0"),
        (lambda: Passive(half_life_s=0), "half_life_s=0"),
        (lambda: Passive(least_nbytes=0), "least_nbytes=0"),
        (lambda: Passive(margin=1), "margin=1"),
    ],
)
def test_what_makes_no_sense_is_refused(made: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        made()


def test_a_range_and_a_threshold() -> None:
    def available(low: float, high: float, *, high_seen: bool = True) -> Available:
        return Available(low, high, True, high_seen, "resolution", 1, 1, 0, 1, 1.0, 1.0, 0)

    assert available(40, 60).mean_bytes_s == 50
    assert available(50, 60).sufficient(50) is True
    assert available(40, 49).sufficient(50) is False
    assert available(40, 60).sufficient(50) is None
    assert available(40, 49, high_seen=False).sufficient(50) is None


# ---- trains


def through_bucket(rate: float, bucket_nbytes: int, packets: int, line: float) -> list[float]:
    """Arrivals of a train behind a full token bucket."""
    return [
        7e8 + max(index * FRAME / line, (index * FRAME - bucket_nbytes) / rate)
        for index in range(packets)
    ]


@pytest.mark.parametrize("mbit", [5, 40, 300])
@pytest.mark.parametrize("bucket_nbytes", [0, 60_000, 131_072])
def test_a_train_shows_the_rate_and_the_bucket_before_it(mbit: int, bucket_nbytes: int) -> None:
    seen = knee(through_bucket(mbit * MBIT, bucket_nbytes, 256, 2000 * MBIT), FRAME)
    assert seen is not None
    assert seen.clear
    assert seen.rate_bytes_s == pytest.approx(mbit * MBIT, rel=0.01)
    assert seen.burst_nbytes == pytest.approx(bucket_nbytes, rel=0.05, abs=FRAME)


def test_a_train_that_ends_soon_after_the_bucket_is_not_clear() -> None:
    seen = knee(through_bucket(40 * MBIT, 131_072, 120, 2000 * MBIT), FRAME)
    assert seen is not None
    assert not seen.clear


def test_a_train_of_which_little_came_shows_nothing() -> None:
    assert knee([None] * 100 + [0.1 * index for index in range(8)], FRAME) is None


# ---- transfers themselves


def test_nothing_is_known_before_a_transfer_that_is_large_enough() -> None:
    passive = Passive(least_nbytes=1000)
    assert passive.bytes_s is None
    assert passive.sufficient(1) is None
    passive.tell(999, 0.5)
    passive.tell(5000, 0.0)  # too fast for the clock: no rate follows
    assert passive.bytes_s is None
    passive.tell(1000, 0.5)
    assert passive.bytes_s == pytest.approx(2000)


@given(st.lists(st.integers(0, 999), max_size=30))
def test_small_transfers_do_not_pull_it_down(small: list[int]) -> None:
    passive = Passive(least_nbytes=1000)
    passive.tell(50_000, 0.5)
    for nbytes in small:
        passive.tell(nbytes, 0.1)
    assert passive.bytes_s == pytest.approx(100_000)


def test_what_was_a_half_life_ago_counts_half() -> None:
    passive = Passive(half_life_s=3.0, least_nbytes=1)
    passive.tell(3000, 3.0)
    passive.tell(600, 3.0)
    assert passive.bytes_s == pytest.approx((1000 / 2 + 200) / 1.5)


@given(
    st.lists(
        st.tuples(st.integers(1000, 10**7), st.floats(0.01, 5.0), st.integers(1, 4)),
        min_size=1,
        max_size=8,
    )
)
def test_a_transfer_told_in_pieces_is_the_same(told: list[tuple[int, float, int]]) -> None:
    whole, pieces = Passive(least_nbytes=1), Passive(least_nbytes=1)
    for nbytes, busy_s, parts in told:
        whole.tell(nbytes * parts, busy_s * parts)
        for _ in range(parts):
            pieces.tell(nbytes, busy_s)
    assert whole.bytes_s == pytest.approx(pieces.bytes_s, rel=1e-6)
    rates = [nbytes / busy_s for nbytes, busy_s, _ in told]
    assert whole.bytes_s is not None
    assert 0.999 * min(rates) <= whole.bytes_s <= 1.001 * max(rates)


def test_an_answer_stands_until_the_threshold_is_passed_by_a_margin() -> None:
    passive = Passive(half_life_s=0.001, least_nbytes=1, margin=0.1)  # as good as no memory
    answers = []
    for rate in (104, 97, 103, 91, 89, 95, 105, 109, 111, 92):
        passive.tell(rate, 1.0)
        answers.append(passive.sufficient(100))
    assert answers == [True, True, True, True, False, False, False, False, True, True]


def test_another_threshold_is_another_question() -> None:
    passive = Passive(least_nbytes=1)
    passive.tell(95, 1.0)
    assert passive.sufficient(90) is True
    assert passive.sufficient(100) is False
    assert passive.sufficient(90) is True
    assert passive.sufficient(94) is True


@pytest.mark.parametrize(("nbytes", "busy_s"), [(-1, 1.0), (1, -1.0), (1, math.inf), (1, math.nan)])
def test_no_transfer_is_like_that(nbytes: int, busy_s: float) -> None:
    with pytest.raises(ValueError, match="no transfer"):
        Passive().tell(nbytes, busy_s)
