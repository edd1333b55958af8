"""The real Node SDK drives the whole life cycle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_process import CSV, ServiceProcess

FOLDER = Path(__file__).parent / "service_node"
MODULES = Path(os.environ.get("SERVICE_NODE_MODULES", FOLDER / "node_modules"))

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node"),
    pytest.mark.skipif(
        not MODULES.exists(),
        reason="needs npm ibm-watson: npm install in tests/process/service_node",
    ),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("service") / "data") as service:
        yield service


@pytest.mark.parametrize(
    ("form", "how"), [("stream", "none"), ("buffer", "iam"), ("string", "basic")]
)
def test_life_cycle(service: ServiceProcess, form: str, how: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(CSV)
    env = {**os.environ, "NODE_PATH": str(MODULES), "CSV_PATH": str(path)}
    done = subprocess.run(
        ["node", str(FOLDER / "life_cycle.js"), service.url, form, how, "sk_any"],
        input=CSV,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out = json.loads(done.stdout)
    number = out["created"]["classifier_id"]
    assert out["created"]["name"] == "Wetter ü"
    assert out["listed"]["classifiers"][0]["classifier_id"] == number
    assert out["status"] == "Available"
    assert out["answer"]["text"] == "how hot ü"
    assert out["answer"]["top_class"] == out["answer"]["classes"][0]["class_name"]
    assert [one["text"] for one in out["answers"]["collection"]] == ["rain", "hot"]
    assert out["deleted"] == {}
    assert (out["gone"]["code"], out["gone"]["message"]) == (404, "Not found")
    assert len(out["transaction"]) == 32
