import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.apps.studies.staleness import ramped_staleness
from slipstream.errors import ConfigError


def ramp(staleness: int, ramp_up: int, steps: int) -> list[int]:
    return [ramped_staleness(t, staleness=staleness, ramp_up=ramp_up) for t in range(steps)]


def test_grows_in_a_straight_line() -> None:
    assert ramp(4, 8, 11) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    assert ramp(2, 5, 7) == [0, 0, 0, 1, 1, 2, 2]


def test_without_a_ramp_it_is_there_from_the_start() -> None:
    assert ramp(3, 0, 4) == [3, 3, 3, 3]


@given(st.integers(0, 50), st.integers(0, 200))
def test_never_shrinks_and_ends_at_what_was_asked_for(staleness: int, ramp_up: int) -> None:
    values = ramp(staleness, ramp_up, ramp_up + 2)
    assert values == sorted(values)
    assert values[ramp_up] == values[-1] == staleness


@pytest.mark.parametrize(
    ("step", "staleness", "ramp_up", "message"),
    [
        (-1, 2, 0, "step=-1: count steps from 0"),
        (0, -1, 0, "staleness=-1: give 0"),
        (0, 1, -5, "ramp_up=-5: give 0"),
    ],
)
def test_negative_counts_are_refused(step: int, staleness: int, ramp_up: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ramped_staleness(step, staleness=staleness, ramp_up=ramp_up)
