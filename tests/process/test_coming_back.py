"""A worker is killed, started again, and trains on with the others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from launches import SLIPSTREAM, Launch

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("return_worker.py")
TOTAL = 500


def trained(folder: Path, killed_at: int, total: int, restarts: int = 1) -> Launch:
    told = (str(folder), str(killed_at), str(total), str(folder / "checkpoint"))
    command = (SLIPSTREAM, "run", "--workers", "3", "--restarts", str(restarts), str(WORKER), *told)
    path = os.pathsep.join((str(WORKER.parent), os.environ.get("PYTHONPATH", "")))
    launch = Launch(command, folder, {"PYTHONPATH": path})
    assert launch.wait() == 0, launch.stderr
    assert launch.remains.left() == []
    return launch


def said(folder: Path, rank: int, incarnation: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / f"{rank}.{incarnation}.json").read_text())
    return told


def test_one_that_was_killed_comes_back_with_the_weights_of_the_others(tmp_path: Path) -> None:
    launch = trained(tmp_path, killed_at=60, total=TOTAL)
    assert "rank 1 was killed by SIGKILL; it is started again" in launch.stderr
    assert 'member_admitted member="rank 1" step=' in launch.stderr
    others = [said(tmp_path, 0), said(tmp_path, 2)]
    back = said(tmp_path, 1, incarnation=1)
    assert len({each["digest"] for each in (*others, back)}) == 1
    assert others[0]["workers"] == 3
    assert [each["steps"] for each in others] == [list(range(TOTAL))] * 2
    first = back["steps"][0]
    assert 60 < first < TOTAL
    assert back["steps"] == list(range(first, TOTAL))
    # With weights of its own it would have begun where the others did.
    assert back["losses"][0] < 0.5 * others[0]["losses"][0]
    assert len({each["rate"] for each in (*others, back)}) == 1
    assert {each["shared"] for each in (*others, back)} == {TOTAL - 1}
    assert back["before"] == 17


def test_one_that_would_come_back_too_late_does_not_spoil_the_end(tmp_path: Path) -> None:
    trained(tmp_path, killed_at=60, total=70)
    assert said(tmp_path, 0)["digest"] == said(tmp_path, 2)["digest"]
    assert not (tmp_path / "1.1.json").exists()
