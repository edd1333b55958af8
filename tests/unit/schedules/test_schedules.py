import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.schedules import AfterBackward, Priority, Schedule, WaitFree


def leaving(schedule: Schedule, layers: int) -> list[int]:
    """Forward places of layers, in the order in which a busy link takes them."""
    return sorted(
        range(layers),
        key=lambda o: schedule.priority(forward_order=o, backward_order=layers - o),
    )


@given(st.integers(0, 50))
def test_priority_sends_first_what_the_next_forward_needs_first(layers: int) -> None:
    assert leaving(Priority(), layers) == list(range(layers))


@pytest.mark.parametrize("schedule", [AfterBackward(), WaitFree()])
@given(layers=st.integers(0, 50))
def test_the_others_send_in_the_order_backward_makes_them(schedule: Schedule, layers: int) -> None:
    assert leaving(schedule, layers) == list(reversed(range(layers)))


def test_who_waits_for_the_whole_backward() -> None:
    assert not AfterBackward().leaves_during_backward
    assert WaitFree().leaves_during_backward
    assert Priority().leaves_during_backward
