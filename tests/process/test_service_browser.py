"""The page in a real browser, 360 pixels wide, by file field and keyboard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from node_tools import CHROMIUM, FOLDER, MODULES, needs_node
from service_process import PACED, ServiceProcess, environment

TRIPS = Path(__file__).parents[2] / "examples" / "trips.csv"

pytestmark = [
    pytest.mark.process,
    *needs_node("playwright-core"),
    pytest.mark.skipif(not CHROMIUM, reason="needs chromium"),
]


def browse(scenario: str, service: ServiceProcess, folder: Path, *more: str) -> dict:
    env = {**os.environ, "NODE_PATH": str(MODULES), "CSV_PATH": str(TRIPS), "CHROMIUM": CHROMIUM}
    done = subprocess.run(
        ["node", str(FOLDER / "browser.js"), scenario, service.url, str(folder), *more],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout, done.stderr
    out = json.loads(done.stdout)
    assert "failed" not in out, out
    assert out["outside"] == []  # no request to anywhere else
    assert out["wide"] == []  # nothing has to be scrolled sideways
    return out


def browse_held(
    scenario: str, service: ServiceProcess, folder: Path, until: Callable[[], bool]
) -> dict:
    """The same; its job does not end before the page is so far, however slow the browser is."""
    service.hold(30)
    with ThreadPoolExecutor(1) as pool:
        browsing = pool.submit(browse, scenario, service, folder)
        service.wait_for(lambda: browsing.done() or until())
        service.go()
        return browsing.result()


def test_from_a_file_to_its_end(tmp_path: Path) -> None:
    """Upload, curve, log, answer, report, download, delete; a refused CSV before."""
    paced = {"PYTHONPATH": str(PACED)}
    with ServiceProcess(tmp_path / "data", "--epochs", "300", real=True, env=paced) as service:
        out = browse_held("life", service, tmp_path, (tmp_path / "curve.png").exists)
    assert out["errors"] == []
    said, disabled = out["refused"]
    assert "bad.csv: Malformed data. The 'class' value at line 3" in said
    assert disabled
    assert out["suggested"] == "second"  # it follows the file
    assert out["checked"].startswith("trips.csv: 128 rows, ")
    assert out["title"] == "<img src=x onerror=alert(1)>"
    assert out["images"] == 0
    assert out["drawn"][0] < out["drawn"][-1]  # the curve grew while one looked
    assert out["answers"][0].startswith("hotel")
    assert "Accuracy" in out["report"]
    assert "Classes, worst first" in out["tables"]
    assert out["data"] == TRIPS.read_text()


def test_cancel_and_train_again(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        out = browse_held("cancel", service, tmp_path, (tmp_path / "cancelled.png").exists)
    assert out["errors"] == []
    assert out["gone"]


def test_keys_on_the_page(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "slipstream.cli", "keys", "add", "team", "--data", str(data)]
    made = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    with ServiceProcess(data) as service:
        out = browse("keys", service, tmp_path, made.stdout.strip())
    assert "needs an API key" in out["without"]
    assert out["wrong"].startswith("Unauthorized. The API key is missing, unknown or revoked.")
    assert out["right"]
    # A browser logs answers of 401 as errors; nothing else may be there.
    assert all("401" in line for line in out["errors"])
