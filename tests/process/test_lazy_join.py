"""Under ``slipstream run`` workers join when they need each other, not in ``slipstream.init``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from launches import SLIPSTREAM, Launch

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("lazy_worker.py")


@pytest.fixture
def run(launch: Callable[..., Launch]) -> Callable[[str], Launch]:
    def start(case: str) -> Launch:
        return launch(SLIPSTREAM, "run", "--workers=2", "--json=figures.json", str(SCRIPT), case)

    return start


def test_init_returns_before_the_others_have_come(run: Callable[[str], Launch]) -> None:
    """Rank 1 calls init when rank 0's has returned."""
    job = run("late")
    assert job.wait() == 0, job.stderr
    figures = json.loads((job.folder / "figures.json").read_text())
    assert len(set(figures["weights_sha256"])) == 1
    assert job.remains.left() == []


def test_what_is_shared_before_distribute_is_rank_0s(run: Callable[[str], Launch]) -> None:
    job = run("share")
    assert job.wait() == 0, job.stderr
    assert [(job.folder / f"shared.{rank}").read_text() for rank in range(2)] == ["17", "17"]


def test_workers_that_never_distribute_still_end_together(run: Callable[[str], Launch]) -> None:
    job = run("no distribute")
    assert job.wait() == 0, job.stderr
    assert "job.distribute was never called" in job.stderr
    assert len(json.loads((job.folder / "figures.json").read_text())["per_worker"]) == 2


@pytest.mark.parametrize("case", ["all swap", "one swaps"])
def test_an_error_before_joining_is_said_once(run: Callable[[str], Launch], case: str) -> None:
    job = run(case)
    assert job.wait() == 1, job.stderr
    said = [line for line in job.stderr.splitlines() if "takes a model and an optimizer" in line]
    assert len(said) == 1, job.stderr
    assert job.remains.left() == []


def test_one_that_fails_before_joining_is_named(run: Callable[[str], Launch]) -> None:
    job = run("one fails")
    assert job.wait() == 1, job.stderr
    assert "ZeroDivisionError: on purpose" in job.stderr
    assert job.own_lines == ["slipstream: rank 1 exited with code 1; the other ranks were stopped"]
    assert job.remains.left() == []
