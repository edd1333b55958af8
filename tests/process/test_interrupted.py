"""Ctrl-C of a real job: the script's own handler runs on every rank, and nothing is left."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launches import SLIPSTREAM, Launch, until

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("interrupted_worker.py")
CASES = [("within", "push_pull"), ("around", "allreduce"), ("around", "gadei"), ("none", "ako")]
OTHER = "[rank 1] "
# What Python prints if the signal comes while a destructor runs.
IGNORED = re.compile(
    r"^Exception ignored .*\nTraceback .*\n(?: .*\n)*KeyboardInterrupt.*\n", re.MULTILINE
)


def heeded(stderr: str) -> str:
    """Of each rank, without interrupts that Python ignored; lines of two ranks may be mixed."""
    lines = stderr.splitlines(keepends=True)
    of_other = "".join(line.removeprefix(OTHER) for line in lines if line.startswith(OTHER))
    rest = "".join(line for line in lines if not line.startswith(OTHER))
    return IGNORED.sub("", rest) + IGNORED.sub("", of_other)


def test_every_rank_handles_ctrl_c_itself(launch: Callable[..., Launch]) -> None:
    command = (SLIPSTREAM, "run", "--workers=2", str(WORKER))
    jobs = {case: launch(*command, *case) for case in CASES}
    for job in jobs.values():
        started = [job.folder / f"trains.{rank}" for rank in range(2)]
        until(lambda files=started: all(map(Path.exists, files)), "training to begin")
        job.send(signal.SIGINT)
    for (handler, strategy), job in jobs.items():
        assert job.wait() == 130, f"{strategy}: {job.stderr}"
        # Ranks are interrupted in different steps: one that goes on after this cannot finish well.
        said = job.own_lines if handler != "within" else job.own_lines[-1:]
        assert said == ["slipstream: stopped by Ctrl-C"], f"{strategy}: {job.stderr}"
        assert "Traceback" not in heeded(job.stderr), f"{strategy}: {job.stderr}"
        saved = sorted(job.folder.glob("saved.*.pt"))
        assert len(saved) == (0 if handler == "none" else 2), f"{strategy}: {job.stdout}"
        assert all(torch.load(file)["weight"].isfinite().all() for file in saved)
        assert job.remains.left() == []
