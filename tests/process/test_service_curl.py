"""A third client: curl, as IBM's documentation writes its commands."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from service_process import CSV, ServiceProcess

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl"),
]


def curl(*arguments: str) -> dict:
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--max-time", "120", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_life_cycle_by_curl(tmp_path: Path) -> None:
    path = tmp_path / "weather.csv"
    path.write_text(CSV)
    with ServiceProcess(tmp_path / "data") as service:
        url = f"{service.url}/natural-language-classifier/api/v1/classifiers"
        metadata = 'training_metadata={"language": "en", "name": "Wetter"}'
        # Parts in any order, with types or without.
        made = curl("-u", "apikey:any", "-F", f"training_data=@{path}", "-F", metadata, url)
        one = f"{url}/{made['classifier_id']}"
        assert made["url"] == one
        assert curl(url)["classifiers"][0]["name"] == "Wetter"
        service.wait_status(made["classifier_id"], "Available")
        by_query = curl("-G", one + "/classify", "--data-urlencode", "text=How hot is it?")
        json_type = ("-H", "Content-Type:application/json")
        by_body = curl(*json_type, "-d", '{"text": "How hot is it?"}', one + "/classify")
        assert by_query == by_body
        assert by_query["top_class"] == "temperature"
        forgot = curl("-F", f"training_data={path}", "-F", metadata, url)
        assert "forgot the @?" in forgot["description"]
        assert curl("-X", "DELETE", one) == {}
        assert curl(one)["error"] == "Not found"


def test_a_large_body_that_is_not_wanted(tmp_path: Path) -> None:
    """curl sees the answer while it still sends."""
    path = tmp_path / "large.csv"
    path.write_bytes(b"x" * (32 << 20))
    with ServiceProcess(tmp_path / "data", "--max-body", "1") as service:
        send = ("-H", "Expect:", "-F", f"training_data=@{path}")
        assert curl(*send, f"{service.url}/nowhere")["error"] == "Not found"
        assert curl(*send, f"{service.url}/v1/classifiers")["error"] == "Request too large"
