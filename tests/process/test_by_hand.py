"""Loops that update weights by hand where nothing is exchanged before ``step()`` are told early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import ForkServer
from launches import SLIPSTREAM, Launch

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("by_hand_worker.py")
SERVER = "push_pull(update='server')"
SYSTEMS = {  # and how messages name them
    SERVER: 'push_pull(update="server")',
    "backup_workers(first=1)": "backup_workers",
    "bounded_staleness(s=2)": "bounded_staleness",
    "async_sgd": "async_sgd",
    "diloco(every=4)": "diloco",
}


def assert_told(told: str, name: str) -> None:
    early = (
        "UserWarning: backward() is called, and weights change, without optimizer.step(), and with "
        f"{name}"
    )
    late = f"slipstream: backward() was called without optimizer.step(), and with {name} nothing"
    assert told.count(early) == 1, told
    assert told.count(late) == 1, told
    assert told.index(early) < told.index(late)
    assert "by_hand_worker.py" in told.partition(early)[0], "the user's line"


def test_it_is_told_while_it_trains(fork_server: ForkServer) -> None:
    runs = {system: fork_server.start(WORKER, system, "by hand", ranks=2) for system in SYSTEMS}
    for system, run in runs.items():
        assert 0 not in run.wait(), run.told()
        assert_told(run.stderr(0), SYSTEMS[system])
        assert "UserWarning" not in run.stderr(1), run.told()


def test_a_learner_is_told_while_it_trains(launch: Callable[..., Launch]) -> None:
    job = launch(SLIPSTREAM, "run", "--workers=1", "--strategy=gadei", WORKER, "gadei", "by hand")
    assert job.wait() == 1
    assert_told(job.stderr, "gadei")


@pytest.mark.parametrize("loop", ["accumulates", "gan"])
def test_a_loop_that_makes_a_step_later_is_not_told(fork_server: ForkServer, loop: str) -> None:
    systems = [SERVER, "diloco(every=4)", *(["async_sgd"] if loop == "accumulates" else [])]
    runs = [fork_server.start(WORKER, system, loop, ranks=2) for system in systems]
    for run in runs:
        assert run.wait() == [0, 0], run.told()


def test_a_learner_that_accumulates_is_not_told(launch: Callable[..., Launch]) -> None:
    job = launch(
        SLIPSTREAM, "run", "--workers=1", "--strategy=gadei", WORKER, "gadei", "accumulates"
    )
    assert job.wait() == 0, job.stderr
