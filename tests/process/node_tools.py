"""What the tests run with Node: the real SDK, a real browser. Missing parts skip a test."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "service_node"
MODULES = Path(os.environ.get("SERVICE_NODE_MODULES", FOLDER / "node_modules"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""


def needs_node(package: str = "") -> list[pytest.MarkDecorator]:
    """Skips without Node or without this package of it."""
    marks = [pytest.mark.skipif(shutil.which("node") is None, reason="needs node")]
    if package:
        reason = f"needs npm's {package}: npm install in tests/process/service_node"
        marks.append(pytest.mark.skipif(not (MODULES / package).exists(), reason=reason))
    return marks
