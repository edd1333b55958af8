"""When a job stops early, and at what rate it then trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.apps.service.held_out_curve import HeldOutCurve
from slipstream.apps.service.schedule import FALL_EPOCHS, Point, Schedule, stalled_at
from slipstream.apps.service.settings import JobSetting, TextSetting

ROWS, HELD = 900, 100
JOB = JobSetting(epochs=200, patience_epochs=20, least_updates_to_stop=0)
FULL = Schedule.of(JOB, TextSetting(), ROWS, HELD)
EPOCH = FULL.planned // FULL.epochs


def flat_from(epoch: int, every: int = 4, until: int = 180) -> list[Point]:
    """A curve that rises until an epoch and stays there."""
    epochs = range(every, until, every)
    return [Point(number * EPOCH, min(number, epoch) / 1000) for number in epochs]


def test_flat_curve_stops_after_the_patience() -> None:
    early = FULL.after(flat_from(40), JOB)
    assert early.stop == 60 * EPOCH
    assert early.first == (60 + FALL_EPOCHS) * EPOCH
    assert early.total - early.first == FULL.total - FULL.first
    assert early.last_epoch < FULL.last_epoch == 200


def test_rising_curve_makes_all_epochs() -> None:
    assert FULL.after(flat_from(180), JOB) == FULL
    assert FULL.after([], JOB) == FULL


def test_small_set_does_not_stop() -> None:
    few = JobSetting(patience_epochs=20, least_updates_to_stop=FULL.total)
    assert FULL.after(flat_from(40), few) == FULL


def test_stop_that_would_save_nothing_changes_nothing() -> None:
    assert FULL.stopped_from(FULL.first - FALL_EPOCHS * EPOCH) == FULL


def test_job_may_stop_until_the_stop_would_save_nothing() -> None:
    last = FULL.first - FALL_EPOCHS * EPOCH  # a stop from here on saves nothing
    flat = flat_from(40, until=61)
    assert FULL.may_stop([], JOB, 0)
    assert FULL.may_stop(flat, JOB, last - 1)
    assert not FULL.may_stop(flat, JOB, last)
    recent = [*flat, Point(last - 20 * EPOCH, 0.9)]
    assert not FULL.may_stop(recent, JOB, last - 20 * EPOCH)
    assert not FULL.after(flat, JOB).may_stop(flat, JOB, 60 * EPOCH)  # it does
    few = JobSetting(patience_epochs=20, least_updates_to_stop=FULL.total)
    assert not FULL.may_stop(flat, few, 0)
    assert not Schedule.of(JOB, TextSetting(), 40, 0).may_stop([], JOB, 0)  # nothing is measured


def test_rate_falls_to_zero_and_the_final_pass_has_its_usual_rates() -> None:
    early = FULL.after(flat_from(40), JOB)
    assert early.stop is not None
    assert early.rate(early.stop) == pytest.approx(FULL.rate(early.stop))
    assert early.rate(early.stop - 1) == FULL.rate(early.stop - 1)
    fall = [early.rate(update) for update in range(early.stop, early.first)]
    assert fall == sorted(fall, reverse=True)
    assert fall[-1] < FULL.rate(0) / len(fall)
    for left in range(1, early.total - early.first, 997):
        assert early.rate(early.total - left) == pytest.approx(FULL.rate(FULL.total - left))


@given(st.lists(st.integers(0, 20), max_size=40), st.integers(1, 10), st.integers(0, 40))
def test_decision_stays_when_the_curve_goes_on(
    values: list[int], patience: int, shown: int
) -> None:
    """So a learner that reads later, or again after a restart, decides as the others."""
    curve = [Point(number, value / 20) for number, value in enumerate(values)]
    before = stalled_at(curve[:shown], patience)
    assert before is None or before == stalled_at(curve, patience)


def test_curve_is_read_by_others_and_after_a_restart(tmp_path: Path) -> None:
    mine, theirs = HeldOutCurve(tmp_path), HeldOutCurve(tmp_path)
    assert theirs.points() == []
    for number in (1, 2, 3):
        mine.add(number, number / 4)
        assert theirs.points()[-1] == Point(number, number / 4)
    again = HeldOutCurve(tmp_path)
    again.add(4, 1.0)
    assert mine.points() == theirs.points() == [Point(n, n / 4) for n in (1, 2, 3, 4)]
