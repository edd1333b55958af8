"""What training scripts do besides training: in every system, an unchanged script runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from launches import SLIPSTREAM, Launch

from slipstream.systems import SYSTEMS

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("loops_worker.py")
WORKERS = 2
LIMIT_S = 240.0
BY_SERVERS = "push_pull(update='server')"
AHEAD = "parameter_flow(staleness=1)"
GADEI = "gadei"
# Arguments without which a system does not train two workers, or its part is not the one meant.
NAMED = {
    "backup_workers": "backup_workers(first=2)",
    "diloco": "diloco(every=2)",
    "local_sgd": "local_sgd(every=2)",
    "poseidon": "poseidon(rate='1gbit', gemm_gflops=50, server_gbytes=5)",
}
ALL = [NAMED.get(name, name) for name in SYSTEMS if name != GADEI] + [BY_SERVERS, AHEAD]
# Workers do not wait for each other, so that two runs need not end with the same weights.
FREE = ("ako", "async_sgd", "bounded_staleness", AHEAD)
Told = list[dict[str, Any]]  # by rank


def read(folder: Path, number: int, workers: int) -> Told:
    told = [json.loads((folder / f"{number}.{rank}.json").read_text()) for rank in range(workers)]
    errors = [f"rank {rank}: {each['error']}" for rank, each in enumerate(told) if "error" in each]
    assert not errors, "\n".join(errors)
    return told


def write_plan(folder: Path, plan: Sequence[dict[str, Any]]) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    return path


def copies_plan() -> list[dict[str, Any]]:
    return [
        {"kind": "copies", "strategy": strategy, "copies": copies, "exact": strategy != "ako"}
        for strategy in ALL
        for copies in (True, False)
    ]


@pytest.fixture(scope="module")
def copies(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies")
    plan = write_plan(folder, copies_plan())
    run = fork_server.run(WORKER, str(plan), str(folder), ranks=WORKERS, limit_s=LIMIT_S)
    assert set(run.codes.values()) == {0}, run.told()
    assert run.remains.left() == []
    return folder


@pytest.mark.parametrize("strategy", ALL)
def test_copies_of_a_model_in_training_are_plain_ones(strategy: str, copies: Path) -> None:
    at = 2 * ALL.index(strategy)
    copying, undisturbed = read(copies, at, WORKERS), read(copies, at + 1, WORKERS)
    assert [told["trouble"] for told in copying] == [[]] * WORKERS
    if strategy not in FREE:
        assert copying[0]["digest"] == undisturbed[0]["digest"]


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory without a name is Linux's")
def test_copies_of_a_model_in_shared_memory_are_plain_ones(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    asked = {"kind": "copies", "strategy": GADEI, "copies": True, "exact": False}
    plan = write_plan(tmp_path, [asked])
    command = (SLIPSTREAM, "run", "--workers", "1", "--strategy", GADEI)
    run = launch(*command, str(WORKER), str(plan), str(tmp_path))
    assert run.wait() == 0, run.stderr
    assert read(tmp_path, 0, 1)[0]["trouble"] == []
