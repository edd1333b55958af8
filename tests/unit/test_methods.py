"""Partial exchange: who may begin a step, and how much an update counts."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.methods import PartialExchange, Rounds, SharedMemoryUpdates
from slipstream.routes import Everywhere, Route
from slipstream.topologies import Mesh


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
    assert PartialExchange(staleness=2).may_begin(step, heard, partitions=3) is may


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
def test_partial_exchange_trusts_heartbeats_as_far_as_steps_may_be_in_flight(
    updates: int, beat: int, clock: int
) -> None:
    assert PartialExchange(staleness=2).clock(updates, beat, partitions=3) == clock


def test_by_default_four_steps_for_each_worker() -> None:
    assert PartialExchange().among(8).staleness == 32
    assert PartialExchange(staleness=5).among(8).staleness == 5


@pytest.mark.parametrize("tau", [-1, 1.5, "2"])
def test_a_staleness_that_makes_no_sense_is_refused(tau: object) -> None:
    with pytest.raises(ConfigError, match="staleness"):
        PartialExchange(staleness=tau)  # type: ignore[arg-type]


def test_the_number_of_workers_must_be_known() -> None:
    with pytest.raises(ConfigError, match="the number of workers is not known"):
        PartialExchange().may_begin(0, {1: 0}, partitions=1)


@pytest.mark.parametrize("workers", [1, 4, 9])
def test_all_workers_together_move_as_far_as_was_asked(workers: int) -> None:
    assert workers * PartialExchange().coefficient(5, workers) == pytest.approx(1)
    assert workers * PartialExchange(growth="sqrt").coefficient(5, workers) == pytest.approx(
        workers**0.5
    )
    assert workers * PartialExchange(growth="linear").coefficient(5, workers) == pytest.approx(
        workers
    )


def test_growth_is_reached_gradually() -> None:
    steps = PartialExchange(growth="linear", warm_steps=10)
    assert [8 * steps.coefficient(step, 8) for step in (0, 5, 10, 99)] == pytest.approx(
        [1, 4.5, 8, 8]
    )


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (PartialExchange, {"partitions": 0}),
        (PartialExchange, {"partitions": 2.0}),
        (PartialExchange, {"bytes_s": 0.0}),
        (PartialExchange, {"growth": "cubic"}),
        (PartialExchange, {"warm_steps": -1}),
        (SharedMemoryUpdates, {"slots": 0}),
        (SharedMemoryUpdates, {"slots": 65}),
        (SharedMemoryUpdates, {"consistent": 1}),
        (SharedMemoryUpdates, {"apply": "worker"}),
        (SharedMemoryUpdates, {"checkpoints": ""}),
        (SharedMemoryUpdates, {"every_s": 0}),
        (Rounds, {"routes": Everywhere(Route(Mesh())), "chunk_bytes": 0}),
    ],
)
def test_what_makes_no_sense_is_refused(part: Any, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=list(wrong)[-1]):
        part(**wrong)
