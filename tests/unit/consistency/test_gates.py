"""Who may begin a step where nobody makes rounds."""

from __future__ import annotations

import pytest

from slipstream.consistency import LagBehindPeers, Progress
from slipstream.errors import ConfigError


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
    assert LagBehindPeers(2).may_begin(step, heard, partitions=3) is may


@pytest.mark.parametrize(
    ("updates", "beat", "clock"),
    [
        (3, 0, 3),  # no heartbeat yet
        (3, 5, 5),
        (3, 8, 8),  # p + τ steps may be in flight
        (3, 9, 8),
        (3, 99, 8),
    ],
)
def test_lag_behind_peers_trusts_heartbeats_as_far_as_steps_may_be_in_flight(
    updates: int, beat: int, clock: int
) -> None:
    assert LagBehindPeers(2).clock(updates, beat, partitions=3) == clock


def test_by_default_four_steps_for_each_worker() -> None:
    assert LagBehindPeers().among(8).extra == 32
    assert LagBehindPeers(5).among(8).extra == 5


@pytest.mark.parametrize("tau", [-1, 1.5, "2"])
def test_a_staleness_that_makes_no_sense_is_refused(tau: object) -> None:
    with pytest.raises(ConfigError, match="staleness"):
        LagBehindPeers(tau)  # type: ignore[arg-type]


def test_nobody_waits_for_a_round_and_the_number_of_workers_must_be_known() -> None:
    assert LagBehindPeers(1).may_start(Progress(round=9, committed=0))
    with pytest.raises(ConfigError, match="how many workers there are is not known"):
        LagBehindPeers().may_begin(0, {1: 0}, partitions=1)
