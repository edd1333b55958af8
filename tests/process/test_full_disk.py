"""A disk that fills up under ``--log``, ``--tensorboard`` and ``--json`` costs figures only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import ForkServer
from full_disk_worker import STEPS
from small_disk import small_disk

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("full_disk_worker.py")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "8k") as disk:
        yield disk


def test_training_goes_on_and_the_figures_are_told(fork_server: ForkServer, disk: Path) -> None:
    log, board = disk / "run.jsonl", disk / "board"
    places = {"LOG": str(log), "TENSORBOARD": str(board), "JSON": "/dev/full"}
    run = fork_server.run(
        SCRIPT, ranks=2, env={f"SLIPSTREAM_{key}": place for key, place in places.items()}
    )
    assert run.codes == {0: 0, 1: 0}, run.told()
    assert run.stdout(0) == run.stdout(1) == f"trained {STEPS}\n"
    full = "cannot be written (No space left on device). Training continues"
    said = "\n".join(run.own_lines())
    assert len(run.own_lines()) == 3, said
    assert f"slipstream: the run log {log} {full}" in said
    assert f"slipstream: TensorBoard's events in {board} {full}" in said
    assert "slipstream: the figures cannot be written to /dev/full (No space left on dev" in said
    figures = run.stderr(0).partition("here they are:\n")[2].splitlines()[0]
    assert json.loads(figures)["steps"] == STEPS
    whole = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [line["step"] for line in whole if line["event"] == "step"]
    # Later figures are tried again, and a shorter line may still fit.
    assert steps == sorted(set(steps))
    assert steps[:10] == [*range(1, 11)]
    assert len(steps) < STEPS


def test_alone_too(fork_server: ForkServer) -> None:
    unset = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")
    run = fork_server.run(SCRIPT, ranks=[unset], env={"SLIPSTREAM_JSON": "/dev/full"})
    assert run.codes == {0: 0}, run.told()
    assert "here they are:\n{" in run.stderr(0)
