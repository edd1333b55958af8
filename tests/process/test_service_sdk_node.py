"""The real Node SDK drives the whole life cycle."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_tools import FOLDER, MODULES, needs_node
from service_process import CSV, ServiceProcess

pytestmark = [pytest.mark.process, *needs_node("ibm-watson")]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("service") / "data") as service:
        yield service


def run(program: str, *arguments: str, csv: Path | None = None) -> dict:
    env = {**os.environ, "NODE_PATH": str(MODULES), "CSV_PATH": str(csv)}
    done = subprocess.run(
        ["node", str(FOLDER / program), *arguments],
        input=CSV,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def life_cycle(service: ServiceProcess, form: str, how: str, folder: Path) -> None:
    path = folder / "x.csv"
    path.write_text(CSV)
    out = run("life_cycle.js", service.url, form, how, "sk_any", csv=path)
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


@pytest.mark.parametrize(
    ("form", "how"), [("stream", "none"), ("buffer", "iam"), ("string", "basic")]
)
def test_life_cycle(service: ServiceProcess, form: str, how: str, tmp_path: Path) -> None:
    life_cycle(service, form, how, tmp_path)


def test_the_real_net_by_node(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data", real=True) as service:
        life_cycle(service, "stream", "none", tmp_path)


def test_retries_of_node_get_through(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data", "--rate", "10") as service:
        while "GET '/v1/classifiers' 429" not in service.log.read_text():
            out = run("retries.js", service.url, "12")  # 10 at once, then one in 6 s
            assert out["answers"] == [{"classifiers": []}] * 12
