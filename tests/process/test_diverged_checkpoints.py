"""A checkpoint with NaN is refused on every rank, and taken if the loop asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import ForkServer
from launches import SLIPSTREAM, Launch

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("diverged_worker.py")
SYSTEMS = ("push_pull", "push_pull(update='server')", "backup_workers(first=2)", "ako", "diloco")
REFUSED = "model/weight has values that are not finite"


def test_checkpoint_with_nan_is_refused_on_all_ranks(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    (saved,) = [fork_server.start(WORKER, "save", str(tmp_path), "push_pull", ranks=1)]
    assert saved.wait() == [0], saved.told()
    runs = [fork_server.start(WORKER, "load", str(tmp_path), each, ranks=2) for each in SYSTEMS]
    for run in runs:
        assert run.wait() == [0, 0], run.told()
        for rank in (0, 1):
            refused, kept, taken = run.stdout(rank).splitlines()
            assert REFUSED in refused
            assert (kept, taken) == ("kept", "taken")


def test_checkpoint_with_nan_is_refused_by_the_server_of_shared_weights(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    for what in ("save", "load"):
        command = (SLIPSTREAM, "run", "--workers=2", "--strategy=gadei", str(WORKER))
        job = launch(*command, what, str(tmp_path), "gadei")
        assert job.wait() == 0, job.stderr
    assert job.stdout.count(REFUSED) == 2
    assert job.stdout.count("kept") == job.stdout.count("taken") == 2
