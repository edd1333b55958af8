import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.consistency import Progress, Rounds


@given(st.integers(0, 1 << 40))
def test_a_round_begins_only_when_all_before_it_are_committed(round_: int) -> None:
    assert Rounds().may_start(Progress(round_, committed=round_))
    assert Rounds().may_start(Progress(round_, committed=round_ + 1))
    assert not Rounds().may_start(Progress(round_ + 1, committed=round_))


@pytest.mark.parametrize(
    ("arrived", "admitted"), [(3, False), (4, False), (5, True), (6, True), (7, False)]
)
def test_the_open_round_and_the_one_after_it_are_admitted(arrived: int, admitted: bool) -> None:
    assert Rounds().admits(open_round=5, arrived=arrived) is admitted


@given(st.integers(1, 1000))
def test_all_workers_close_a_round(workers: int) -> None:
    assert Rounds().quorum(workers) == workers
