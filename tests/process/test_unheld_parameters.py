"""Parameters that no given optimizer holds: refused by name if they train, and else left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import ForkServer
from launches import SLIPSTREAM, Launch

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("unheld_worker.py")
SYSTEMS = (
    "push_pull",
    "push_pull(update='server')",
    "ako",
    "backup_workers(first=2)",
    "parameter_flow(staleness=1)",
    "diloco(every=2)",
)


def test_frozen_and_unused_parameters_need_no_optimizer(fork_server: ForkServer) -> None:
    runs = [fork_server.start(WORKER, system, ranks=2) for system in SYSTEMS]
    for system, run in zip(SYSTEMS, runs, strict=True):
        assert run.wait() == [0, 0], f"{system}: {run.told()}"
        files = [run.folder / f"weights.{rank}.json" for rank in range(2)]
        first, second = (json.loads(file.read_text()) for file in files)
        assert first == second, system


UNHELD = ("'second.weight'", "no optimizer", "requires_grad_(False)")
BY_HAND = ("optimizer.step()", "with gadei nothing is exchanged", "allreduce()")


@pytest.mark.parametrize(
    ("strategy", "wrong", "says"),
    [
        ("gadei", "", ()),
        ("gadei", "unheld", UNHELD),
        ("gadei(consistent=True)", "by hand", BY_HAND),
    ],
)
def test_learners(
    launch: Callable[..., Launch], strategy: str, wrong: str, says: tuple[str, ...]
) -> None:
    by_option = ("--workers=1", f"--strategy={strategy}")
    job = launch(SLIPSTREAM, "run", *by_option, str(WORKER), strategy, wrong)
    assert (job.wait() == 0) == (not wrong), job.stderr
    lines = [line for line in job.own_lines if "exited with code" not in line]
    assert len(lines) == bool(wrong), job.stderr
    assert all(fragment in line for line in lines for fragment in says), job.stderr
    assert job.remains.left() == []
