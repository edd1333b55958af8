"""Whole training jobs through the service, with the real net and real learners.

The specification's drills (§7) of one learner and of the update server, and what its §12 wants of
odd rows that are accepted: 8, 9, 13, 19, 20, 21, 22.
"""

from __future__ import annotations

import contextlib
import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
from service_process import PACED, ServiceProcess
from service_sentences import TOPICS, sentences

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory without a name is Linux's"),
]
ROWS = "".join(f"{row}\n" for row in sentences(2))
UPDATE_SERVER = "slipstream.runtime.shared_memory.update_server"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    data = tmp_path_factory.mktemp("service") / "data"
    options = ("--learners", "2", "--epochs", "400")
    with ServiceProcess(data, *options, real=True, env={"PYTHONPATH": str(PACED)}) as service:
        yield service


def top_class(service: ServiceProcess, classifier: str, text: str) -> str:
    url = f"{service.url}/v1/classifiers/{classifier}/classify"
    answer = requests.post(url, json={"text": text}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["top_class"]


def part_of_the_job(service: ServiceProcess, whom: str) -> psutil.Process:
    """The process of a learner or of the update server."""

    def find() -> psutil.Process | None:
        for process in service.children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                command, rank = process.cmdline(), process.environ().get("RANK")
                if whom == "server" and UPDATE_SERVER in command:
                    return process
                if whom == f"rank {rank}" and "slipstream.apps.service.learn" in command:
                    return process
        return None

    return service.wait_for(find)


def test_kills_of_learners_and_of_the_update_server(service: ServiceProcess) -> None:
    service.hold(0)  # it trains slowly until all three are killed
    classifier = service.created(ROWS)
    service.wait_for(lambda: service.state(classifier)["updates"] > 0)
    for whom, said in (
        ("rank 1", "rank 1 was killed by SIGKILL; it is started again"),
        ("server", "training goes on from update"),
        ("rank 0", "rank 0 was killed by SIGKILL; it is started again"),
    ):
        part_of_the_job(service, whom).kill()
        assert service.get("/livez").status_code == 200
        url = f"/api/classifiers/{classifier}/log"
        service.wait_for(lambda url=url, said=said: said in service.get(url).text)
    service.go()
    service.wait_status(classifier, "Available")
    assert service.state(classifier)["attempt"] == 1
    for name, words in [*TOPICS.items()][:2]:
        for word in words:
            assert top_class(service, classifier, f"tell me about {word}") == name


ODD = (
    "text,class\n"  # looks like a header
    + ROWS
    + "".join(f"rain {number},=cmd|' /C calc'!A0\n" for number in range(12))
    + "a\x07b \u202e \N{GRINNING FACE},cafe\u0301\n" * 6
    + '"two\nlines\tof text",food\n'
    + "again and again,weather\n" * 30
    + "".join(f"one text,class {number}\n" for number in range(5))
    + "many classes," + ",".join(f"c{number}" for number in range(500)) + "\n"
    + "<script>alert(1)</script>,{{7*7}}\n'; DROP TABLE classifiers,<b>\n"
)  # fmt: skip


def test_odd_rows_are_trained(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data", real=True) as service:
        classifier = service.created(ODD)
        service.wait_status(classifier, "Available")
        url = f"/api/classifiers/{classifier}"
        assert service.get(f"{url}/data").content == ODD.encode()
        report = service.get(f"{url}/report").json()
        said = " ".join(report["warnings"])
        for warning in ("header", "repeat an earlier row", "different classes"):
            assert warning in said, said
        assert {"caf\u00e9", "{{7*7}}", "<b>", "c499"} <= {
            one["name"] for one in report["per_class"]
        }
        table = list(csv.reader(io.StringIO(service.get(f"{url}/report.csv").text)))
        names = {row[0] for row in table}
        assert "'=cmd|' /C calc'!A0" in names
        assert not [name for name in names if name.startswith(("=", "+", "@"))]
        assert top_class(service, classifier, "rain 5")
