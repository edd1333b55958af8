"""The page in a real browser, 360 pixels wide, by file field and keyboard."""

from __future__ import annotations

import json
import os
import re
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


def browse(scenario: str, service: ServiceProcess, folder: Path, *more: str, files=None) -> dict:
    env = {**os.environ, "NODE_PATH": str(MODULES), "CSV_PATH": str(TRIPS), "CHROMIUM": CHROMIUM}
    env["FILES"] = json.dumps(files)
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
    names = [re.split(r" \d\.", name)[0] for name in out["explained"]]
    assert names == ["Accuracy", "Macro F1", "Calibration error"]
    accuracy, macro_f1, calibration = out["explained"].values()
    assert "right answers" in accuracy
    assert "mean over the classes" in macro_f1
    assert "How far confidence is from the truth" in calibration
    assert "Classes, worst first" in out["tables"]
    assert out["data"] == TRIPS.read_text()


def test_cancel_and_train_again(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        out = browse_held("cancel", service, tmp_path, (tmp_path / "cancelled.png").exists)
    assert out["errors"] == []
    assert out["gone"]
    assert "Training, 30%" in out["listed"]
    assert out["facts"].startswith("Cancelled. ")
    assert "Cancelled;" in out["cancelled"]
    assert "Failed" not in out["facts"] + out["cancelled"]


def test_refused_text_has_no_bars_of_the_text_before(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        out = browse("phrase", service, tmp_path)
    assert out["bars"] == 0
    # A browser logs answers of 400 as errors; nothing else may be there.
    assert [line for line in out["errors"] if "400" not in line] == []


EIGHT = "".join(f"text {number},{name}\n" for number, name in enumerate("abababab"))
DOUBTFUL = {
    "good.csv": EIGHT,
    "header.csv": "Sentence,Label\n" + EIGHT.partition("\n")[2],
    "commas.csv": EIGHT.replace("text 3", "text, of 3").replace("text 5", "text, of 5"),
    "every.csv": EIGHT.replace(",a", ",and,a").replace(",b", ",and,b"),
    "swapped.csv": "".join(f"{name},text {number}\n" for number, name in enumerate("abababab")),
    "alone.csv": "".join(f"text {number}, said {number} times\n" for number in range(8)),
}
DOUBTS = {
    "good.csv": "",
    "header.csv": "The first row looks like a header",
    "commas.csv": "2 rows have several classes, one of them in no other row; the first is line 4, "
    "class “of 3”. Is there a comma in the text?",
    "every.csv": "The class “and” is on nearly every row",
    "swapped.csv": "Text and class seem to be swapped: 2 different values in the first column, "
    "8 classes.",
    "alone.csv": "8 of 8 classes have one row each; the first is line 1, class “said 0 times”.",
}


def test_doubts_show_before_training(tmp_path: Path) -> None:
    """They are warnings: the file can be sent. And the page knows the operator's limits."""
    with ServiceProcess(tmp_path / "data", "--max-rows", "12") as service:
        out = browse("preview", service, tmp_path, files=DOUBTFUL)
    assert out["errors"] == []
    for name, (doubt, can_be_sent) in out["doubts"].items():
        assert doubt.startswith(DOUBTS[name]), name
        assert bool(doubt) == bool(DOUBTS[name])
        assert can_be_sent
    assert set(out["doubts"]) == set(DOUBTS)
    assert "more than 12 rows" in out["raised"]


def test_long_texts_are_counted_and_cut_by_a_switch(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        out = browse("long", service, tmp_path)
    said, counted, disabled = out["refused"]
    assert "Phrase too long. The phrase at line 2 has 1,499 characters" in said
    assert "2 of 5 texts (40.0%) have more than 1,024 characters" in counted
    assert disabled
    assert said.endswith(" To cut long texts, switch on “Cut long texts” below.")
    said, doubts = out["header"]
    assert "switch on “Cut long texts”" in said
    assert doubts.startswith("The first row looks like a header")
    assert out["checked"] == "long.csv: 5 rows, 2 classes."
    assert out["sent"] == ["/v1/classifiers?long=cut"]
    assert out["facts"].endswith("5 rows, 2 classes. 2 long texts were cut.")
    assert out["hidden"]


def test_unknown_classifier(tmp_path: Path) -> None:
    """Also one that is deleted while the page shows it."""
    with ServiceProcess(tmp_path / "data") as service:
        service.hold(30)
        out = browse("missing", service, tmp_path)
    unformed, unknown = out["missing"]
    assert "No such classifier" in unformed
    assert "unknown-id" in unformed
    assert "3f09c2x51c0a7e9d4-nlc-999" in unknown
    assert out["deleted"]
    # A browser logs answers of 404 as errors; nothing else may be there.
    assert [line for line in out["errors"] if "404" not in line] == []


def test_docs_and_guide(tmp_path: Path) -> None:
    """In the page's style, and the examples of /docs run as they are."""
    (tmp_path / "trips.csv").write_bytes(TRIPS.read_bytes())
    with ServiceProcess(tmp_path / "data") as service:
        out = browse("docs", service, tmp_path)
        curl, python = out["examples"]
        run = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120}
        done = subprocess.run([sys.executable, "-c", python], env=environment(), **run)
        assert done.stdout.split()[-1] in ("flight", "food", "hotel", "weather"), done.stderr
        upload, rest = curl.split("id=…")
        made = subprocess.run(["bash", "-ec", upload], **run)
        number = json.loads(made.stdout)["classifier_id"]
        service.wait_status(number, "Available")
        done = subprocess.run(
            ["bash", "-ec", f"{upload.splitlines()[0]}\nid={number}{rest}"], **run
        )
        assert '"status":"Available"' in done.stdout, done.stderr
        assert "event: end" in done.stdout
        assert '"top_class":' in done.stdout
        assert service.get(f"/v1/classifiers/{number}").status_code == 404
    assert out["errors"] == []
    light, dark = (set(colours) for colours in out["colours"].values())
    assert len(light) == len(dark) == 1  # of the page, /docs and /guide alike
    assert light != dark
    assert "slipstream keys add" in out["text"]
    assert "Idempotency-Key" in out["text"]
    assert "--max-rows" in out["guide"]


def test_keys_on_the_page(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "keys",
        "add",
        "team",
        "--data",
        str(data),
    ]
    made = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    with ServiceProcess(data) as service:
        out = browse("keys", service, tmp_path, made.stdout.strip())
    assert "needs an API key" in out["without"]
    assert out["wrong"].startswith("Unauthorized. The API key is missing, unknown or revoked.")
    assert out["right"]
    # A browser logs answers of 401 as errors; nothing else may be there.
    assert all("401" in line for line in out["errors"])
