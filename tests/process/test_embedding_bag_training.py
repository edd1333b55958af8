"""Bags of embeddings travel as rows, wherever embeddings do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fork_server import ForkServer
from launches import SLIPSTREAM, Launch

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("bags_worker.py")
# What is measured on a busy machine may choose otherwise.
POSEIDON = "poseidon(rate='200mbit')"


def test_poseidon_sends_rows_and_trains_as_dense_ones_do(fork_server: ForkServer) -> None:
    told = {}
    for strategy in ("push_pull", POSEIDON):
        run = fork_server.run(WORKER, strategy, ranks=2)
        assert run.codes == {0: 0, 1: 0}, run.told()
        told[strategy] = json.loads((run.folder / "told.0.json").read_text())
    assert any(scheme.startswith("rows/") for scheme in told[POSEIDON]["stats"])
    for name, dense in told["push_pull"]["weights"].items():
        assert torch.allclose(
            torch.tensor(told[POSEIDON]["weights"][name]), torch.tensor(dense), atol=1e-6
        )


def test_gadei_writes_rows_and_its_table_says_so(launch: Callable[..., Launch]) -> None:
    command = (SLIPSTREAM, "run", "--workers=1", "--strategy=gadei", str(WORKER), "gadei")
    job = launch(*command)
    assert job.wait() == 0, job.stderr
    told = json.loads((job.folder / "told.0.json").read_text())
    lines = {line.split()[0]: line for line in told["table"].splitlines() if line}
    assert "rows/memory" in lines["items.weight"]
    assert "dense/memory" in lines["top.weight"]
    assert told["stats"]["dense/memory"] < 4 * 4000 * 8  # not even one whole table
