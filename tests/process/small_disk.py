"""A disk that is soon full, for tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(at: Path, size: str) -> Iterator[Path]:
    """Within, ``at`` has this much room (``8k``, ``200m``); skips the test where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "small", str(at)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)
