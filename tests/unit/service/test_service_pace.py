"""The pace of a job: no jumps, and it follows a machine that becomes busy."""

from __future__ import annotations

from itertools import accumulate, pairwise

from slipstream.apps.service.pace import Pace


def paces(rates: list[float]) -> list[float]:
    """The pace after each second, of a job that makes so many updates in each."""
    pace, found = Pace(), []
    for second, updates in enumerate(accumulate(rates, initial=0)):
        pace.add(at=1000 * second, updates=int(updates))
        found.append(pace.updates_s)
    return found


def test_short_stall_does_not_change_the_pace() -> None:
    found = paces([100.0] * 120 + [0.0] * 10 + [100.0] * 60)
    assert set(found[10:]) == {100.0}


def test_lasting_load_comes_in_without_a_jump() -> None:
    found = paces([100.0] * 180 + [50.0] * 180)
    assert found[180] == 100.0
    assert found[-1] == 50.0
    assert all(after > 0.9 * before for before, after in pairwise(found[180:]))


def test_pace_begins_with_the_first_line_of_an_attempt() -> None:
    pace = Pace()
    assert pace.updates_s == 0
    pace.add(at=90_000, updates=5_000)  # what the checkpoint had is not of this attempt
    assert pace.updates_s == 0
    pace.add(at=91_000, updates=5_100)
    assert pace.updates_s == 100


def test_clock_that_is_set_back_does_not_count() -> None:
    pace = Pace()
    for second in (100, 101, 102, 50, 51, 52, 53, 54, 55, 56):
        pace.add(at=1000 * second, updates=20 * (second if second > 99 else second + 53))
    assert pace.updates_s == 20
