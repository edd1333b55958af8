"""Replicas that should be equal and are not: the first parameter, since when, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from fork_server import ForkServer, Run

from slipstream.methods import Rounds
from slipstream.routes import Everywhere, Route
from slipstream.schedules import AfterBackward
from slipstream.strategy import Strategy
from slipstream.topologies import Sharded
from slipstream.updates import Add, Update, UserSteps

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("replica_worker.py")
EARLY, AT_END = "rank 1 has other weights than rank 0", "rank 1 has ended with other weights"


def runs_of(fork_server: ForkServer, *cases: tuple[str, str]) -> list[Run]:
    runs = [fork_server.start(WORKER, *case, ranks=2) for case in cases]
    for run in runs:
        assert run.wait() == [0, 0], run.told()
    return runs


def warning_of(run: Run) -> str:
    """The one warning about replicas, without its first words."""
    lines = [line for rank in (0, 1) for line in run.stderr(rank).splitlines()]
    (found,) = [line for line in lines if "other weights" in line]
    return found.partition("keeps them equal: ")[2]


def test_difference_found_early_names_parameter_window_and_cause(fork_server: ForkServer) -> None:
    hook, gradients = runs_of(fork_server, ("hook", "push_pull"), ("gradients", "allreduce"))
    for run in (hook, gradients):
        assert EARLY in run.stderr(0)
        assert "job.mean(loss)" not in run.stderr(0), "no scheduler is to blame"
    assert warning_of(hook).startswith("'2.bias' is the first that differs, since the first step")
    assert "steps in backward hooks" in warning_of(hook)
    assert warning_of(gradients).startswith(
        "'2.weight' is the first that differs, since one of the steps 1 to 8; step() used other "
        "gradients there: they were changed after backward()"
    )


def test_difference_after_the_last_comparison_is_named_at_the_end(fork_server: ForkServer) -> None:
    load, settings, head = runs_of(
        fork_server, ("load", "push_pull"), ("settings", "allreduce"), ("head", "push_pull")
    )
    for run in (load, settings, head):
        assert AT_END in run.stderr(0)
    assert warning_of(load).startswith(
        "'0.weight' is the first that differs, since one of the steps 9 to 30; since then it was"
    )
    assert "a checkpoint loaded on one rank" in warning_of(load)
    assert "lr of the optimizer's group 0 is 0.01 there and 0.05 on rank 0" in warning_of(settings)
    assert warning_of(head).startswith(
        "'2.weight' is the first that differs, since it was replaced"
    )


def test_difference_of_update_deltas_in_rounds_of_all_workers_is_named(
    fork_server: ForkServer,
) -> None:
    """All workers apply every delta, so they share their weights after each step."""
    routes, update = Everywhere(Route(Sharded())), Update(UserSteps(), Add("worker"))
    deltas = Strategy("deltas", Rounds(routes, update=update, schedule=AfterBackward()))
    load, equal = runs_of(fork_server, ("load", deltas.to_json()), ("outer", deltas.to_json()))
    assert "'0.weight' is the first that differs" in warning_of(load)
    assert "other weights" not in equal.told(), equal.told()


@pytest.mark.parametrize("case", ["equal", "not finite", "nesterov"])
def test_equal_replicas_are_not_reported(case: str, fork_server: ForkServer) -> None:
    systems = ["push_pull", "allreduce"]
    if case == "equal":
        systems += ["push_pull(update='server')", "poseidon(rate='200mbit')", "diloco", "ako"]
    for run in runs_of(fork_server, *((case, system) for system in systems)):
        assert "other weights" not in run.told(), run.told()


@pytest.mark.parametrize("system", ["push_pull", "push_pull(update='server')", "ako", "diloco"])
def test_criterion_that_was_not_distributed_is_named_once(
    system: str, fork_server: ForkServer
) -> None:
    (run,) = runs_of(fork_server, ("criterion", system))
    assert run.told().count("Adam trains parameters that job.distribute was not given") == 1
