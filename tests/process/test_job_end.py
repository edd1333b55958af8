"""The end of a job: replicas that differ are reported, and a script needs no ``with`` block."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import ForkServer, Run
from launches import SLIPSTREAM, Launch

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("job_end_worker.py")
DIFFERENT = "rank 1 has ended with other weights than rank 0"
TO_JSON = {"SLIPSTREAM_JSON": "figures.json"}


def runs_of(fork_server: ForkServer, *cases: tuple[str, str]) -> list[Run]:
    runs = [fork_server.start(WORKER, *case, ranks=2, env=TO_JSON) for case in cases]
    for run in runs:
        run.wait()
    return runs


def test_replicas_that_differ_are_reported_with_the_cause(fork_server: ForkServer) -> None:
    plateau, by_hand = runs_of(fork_server, ("plateau", "push_pull"), ("by hand", "allreduce"))
    for run in (plateau, by_hand):
        assert run.codes == {0: 0, 1: 0}, run.told()
        assert run.stderr(0).count(DIFFERENT) == 1, run.told()
    assert "lr of the optimizer's group 0 is 0.003125 there and 0.1 on rank 0" in plateau.stderr(0)
    assert "job.mean(loss)" in plateau.stderr(0)
    assert "'0.weight' is the first that differs, since one of the steps 1 to 6" in by_hand.stderr(
        0
    )
    assert "outside of the optimizer" in by_hand.stderr(0)
    assert "job.mean(loss)" not in by_hand.stderr(0), "no scheduler is to blame"


def test_a_mean_of_all_ranks_keeps_replicas_equal(fork_server: ForkServer) -> None:
    systems = ("push_pull", "push_pull(update='server')", "ako", "backup_workers(first=2)")
    runs = runs_of(fork_server, *(("mean", system) for system in systems))
    for run in runs:
        assert run.codes == {0: 0, 1: 0}, run.told()
        assert DIFFERENT not in run.stderr(0), run.told()
        assert run.stdout(0) == run.stdout(1) != ""
        assert "gathered [{'rank': 0}, {'rank': 1}] lr 0.003125" in run.stdout(0)


def test_without_a_with_block_the_job_finishes_at_exit(fork_server: ForkServer) -> None:
    for system in ("push_pull", "ako"):
        (run,) = runs_of(fork_server, ("no with", system))
        assert run.codes == {0: 0, 1: 0}, run.told()
        figures = json.loads((run.folder / "figures.json").read_text())
        assert figures["steps"] == 6
        assert len(set(figures["weights_sha256"])) == 1
        assert run.remains.left() == []


def test_without_a_with_block_large_messages_leave_at_exit(launch: Callable[..., Launch]) -> None:
    """pyzmq's own exit handler once came first, and nothing large could be sent after it."""
    command = (SLIPSTREAM, "run", "--workers=2", "--json=figures.json", str(WORKER))
    systems = ("ako", "backup_workers(first=2)")
    jobs = [launch(*command, "no with, large", system) for system in systems]
    for job in jobs:
        assert job.wait() == 0, job.stderr
        assert json.loads((job.folder / "figures.json").read_text())["steps"] == 6


@pytest.mark.parametrize("system", ["push_pull", "push_pull(update='server')"])
def test_without_a_with_block_an_exit_reaches_the_others(
    fork_server: ForkServer, system: str
) -> None:
    left, caught = runs_of(fork_server, ("no with, exit", system), ("no with, caught exit", system))
    assert left.codes[1] == 3, left.told()
    assert left.codes[0] not in (0, 3)
    assert left.own_lines()[0] == "slipstream: rank 1 failed: SystemExit: 3"
    place = r"\n  on rank 1, at .*job_end_worker.py, line \d+: sys.exit\(3\)\n"
    assert re.search(place, left.stderr(0)), left.told()
    assert caught.codes == {0: 0, 1: 0}, caught.told()


def test_without_a_with_block_errors_reach_the_others(fork_server: ForkServer) -> None:
    failed, early = runs_of(
        fork_server, ("no with, error", "push_pull"), ("no with, early", "push_pull")
    )
    for run in (failed, early):
        assert 0 not in run.wait(), run.told()
        assert not (run.folder / "figures.json").exists()
        assert run.remains.left() == []
    assert "ValueError: of the script" in failed.own_lines()[0]
    assert "same number of steps" in early.own_lines()[0]


FAILS = """
import slipstream
with slipstream.init() as job:
    job.broadcast(None)
    if job.rank == 1:
        raise ValueError(f"no such file: {__file__}")
    job.broadcast(None)
"""


def test_an_error_arrives_from_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    script = tmp_path / os.fsdecode(b"d\xff") / "train.py"
    script.parent.mkdir()
    script.write_text(FAILS)
    command = [SLIPSTREAM, "run", "--workers=2", script]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    told = done.stderr.decode(errors="backslashreplace")
    assert done.returncode == 1, told
    assert "slipstream: rank 1 failed: ValueError: no such file: " in told
    assert "UnicodeEncodeError" not in told


def test_without_a_with_block_under_the_launcher(launch: Callable[..., Launch]) -> None:
    command = (SLIPSTREAM, "run", "--workers=2", "--json=figures.json", str(WORKER))
    jobs = [launch(*command, "no with", strategy) for strategy in ("allreduce", "gadei")]
    for job in jobs[:1]:
        assert job.wait() == 0, job.stderr
        assert json.loads((job.folder / "figures.json").read_text())["steps"] == 6
        assert job.own_lines == []
    assert jobs[1].wait() != 0
    assert "job.gather waits for every rank" in jobs[1].stderr
    assert "job.broadcast(value)" in jobs[1].stderr


LATE = """
import sys
import torch, slipstream
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

with slipstream.init() as job:
    model, optimizer = job.distribute(model, optimizer, sys.argv[1])
    train(3)
train(3)
"""
ENDED = "the job has ended, so nothing that this loop computes now reaches another worker: keep "
UPDATED_ELSEWHERE = ("push_pull(update='server')", "backup_workers(first=1)", "async_sgd", "gadei")


def test_a_loop_that_goes_on_after_the_end_is_told(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    """By a warning where workers update; elsewhere by an error, and not by a wait."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    command = (SLIPSTREAM, "run", "--workers=2", str(script))
    here = [launch(*command, system) for system in ("push_pull", "diloco(every=2)")]
    for job in here:
        assert job.wait() == 0, job.stderr
        assert job.stderr.count(f"UserWarning: {ENDED}") == 1, job.stderr
        assert "late.py:11: UserWarning" in job.stderr
    for job in [launch(*command, system) for system in UPDATED_ELSEWHERE]:
        assert job.wait() == 1, job.stderr
        assert f"slipstream: {ENDED}" in job.stderr
        assert "were stopped" not in job.stderr
