from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import Stage, runs


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    if stage.launcher is not None:
        with stage.launcher as launcher:  # closes its pipes
            launcher.kill()
    for file in tmp_path.glob("*.pid"):
        pid = int(file.read_text())
        if runs(pid):
            os.kill(pid, signal.SIGKILL)
