"""Who may begin a step where nobody makes rounds."""

from __future__ import annotations

import pytest

from slipstream.consistency import WithinReach
from slipstream.errors import ConfigError, IncompatibleRoute


@pytest.mark.parametrize(
    ("step", "heard", "may"),
    [
        (0, {1: 0, 2: 0}, True),
        (4, {1: 0, 2: 9}, True),
        (5, {1: 0, 2: 9}, False),  # p + τ ahead of the slowest
        (5, {1: 1, 2: 9}, True),
        (99, {}, True),  # everybody else has died, or has finished
    ],
)
def test_a_worker_waits_for_the_slowest_it_has_heard_of(
    step: int, heard: dict[int, int], may: bool
) -> None:
    assert WithinReach(2).may_begin(step, heard, partitions=3) is may


def test_by_default_four_steps_for_each_worker() -> None:
    assert WithinReach().among(8).tau == 32
    assert WithinReach(5).among(8).tau == 5


@pytest.mark.parametrize("tau", [-1, 1.5, "2"])
def test_a_staleness_that_makes_no_sense_is_refused(tau: object) -> None:
    with pytest.raises(ConfigError, match="staleness"):
        WithinReach(tau)  # type: ignore[arg-type]


def test_nobody_holds_a_round() -> None:
    with pytest.raises(IncompatibleRoute):
        WithinReach(1).book(3)
