from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.apps.bench.timeline import SPIN_S, Timeline

TICK_S = 1e-6  # what reading the clock takes


class SlackClock:
    """Time that moves a little with every look, and by whatever a sleep oversleeps."""

    def __init__(self, oversleep_s: list[float] | None = None) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self._oversleep_s = oversleep_s or [0.0]

    def __call__(self) -> float:
        self.now += TICK_S
        return self.now

    def sleep(self, seconds: float) -> None:
        late = self._oversleep_s[len(self.slept) % len(self._oversleep_s)]
        self.slept.append(seconds)
        self.now += seconds + late

    def timeline(self) -> Timeline:
        return Timeline(clock=self, sleep=self.sleep)


def elapsed(clock: SlackClock, timeline: Timeline, pieces_s: list[float]) -> float:
    timeline.run(0)
    begun = clock.now
    for seconds in pieces_s:
        timeline.run(seconds)
    return clock.now - begun


@given(
    pieces_s=st.lists(st.floats(0, 0.05), min_size=1, max_size=40),
    oversleep_s=st.lists(st.floats(0, 0.02), min_size=1, max_size=7),
)
def test_the_sum_is_right_however_late_each_sleep_ends(
    pieces_s: list[float], oversleep_s: list[float]
) -> None:
    clock = SlackClock(oversleep_s)
    timeline = clock.timeline()
    took = elapsed(clock, timeline, pieces_s)
    # At worst the last sleep is late, and there is nothing after it to make it good.
    overhead = 5 * TICK_S * (len(pieces_s) + 2)
    assert sum(pieces_s) - overhead <= took <= sum(pieces_s) + max(oversleep_s) + overhead
    assert timeline.busy_s == pytest.approx(sum(pieces_s))


def test_most_is_slept_and_the_last_bit_is_spun() -> None:
    clock = SlackClock()
    took = elapsed(clock, clock.timeline(), [0.01])
    assert took == pytest.approx(0.01, abs=3 * TICK_S)
    assert clock.slept == [pytest.approx(0.01 - SPIN_S, abs=5 * TICK_S)]


def test_the_hosts_own_overhead_hides_behind_the_device() -> None:
    clock = SlackClock()
    timeline = clock.timeline()
    timeline.run(0.01)
    begun = clock.now
    for _ in range(10):
        clock.now += 0.0003
        timeline.run(0.01)
    assert clock.now - begun == pytest.approx(0.1, abs=1e-4)


def test_a_stall_is_not_made_up_for_but_lateness_before_it_is() -> None:
    clock = SlackClock(oversleep_s=[0.004, 0, 0])
    timeline = clock.timeline()
    timeline.run(0.01)
    assert timeline.late_s == pytest.approx(0.004, abs=0.0002)
    clock.now += 0.5  # waiting for a gradient from elsewhere
    begun = clock.now
    timeline.run(0.01)
    assert clock.now - begun == pytest.approx(0.006, abs=0.0002)
    assert timeline.worst_late_s == pytest.approx(0.004, abs=0.0002)


def test_work_that_the_published_speed_includes_is_carried_over() -> None:
    clock = SlackClock()
    timeline = clock.timeline()
    timeline.run(0.01)
    begun = clock.now
    with timeline.included():
        clock.now += 0.05
    for _ in range(10):
        timeline.run(0.01)
    assert clock.now - begun == pytest.approx(0.1, abs=0.0002)
