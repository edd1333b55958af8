"""Every gradient that was pushed is applied once, whoever is killed while pushing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process]

SCRIPT = Path(__file__).with_name("deadly_rings.py")
MOST_WHOLE = 2**24  # that float32 counts to


@pytest.mark.parametrize(("learners", "kills"), [(1, 20), (4, 200)])
def test_what_was_pushed_is_applied_once(learners: int, kills: int) -> None:
    command = [sys.executable, str(SCRIPT), str(learners), str(kills), "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(done.stdout)
    assert found["server"] == 0
    assert min(found["pushed"]) > 0
    assert found["version"] == sum(found["pushed"])
    assert abs(found["expected"]) < MOST_WHOLE
    assert found["whole"] == [found["expected"]]
    assert found["rows_right"]
    assert found["stalled_s"] < 20.0  # a busy machine may stand still for some
