"""Kills, stops, cancels and deletes while a job trains: nothing is lost, nothing is left.

The specification's drills (§7), and the tests that have them (here if no file is named):

=============================== ==================================================================
kill of the API                 test_kill_of_everything_resumes
of the trainer                  test_kill_of_the_trainer
of a learner, the update server test_service_real.py
of everything during an upload  test_kill_during_an_upload
after the model, disk full,     test_service_faults.py
database, PostgreSQL, clock
SIGTERM                         test_stop_lets_the_job_wait, test_stop_during_requests
DELETE while training           test_delete_while_it_trains
500 classifications a second    benchmarks/service_load.py
=============================== ==================================================================
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import requests
from service_process import CSV, LIMIT_S, ServiceProcess, environment

from slipstream.apps.service.database import Database

pytestmark = pytest.mark.process


def gone(service: ServiceProcess, processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert not alive


def test_kill_of_everything_resumes(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        classifier = service.training()
        children = service.children()
        before = service.state(classifier)["percent"]
        (service.data / "incoming" / "half").write_bytes(b"x")
        service.kill()
        gone(service, children)
        service.start()
        assert not list((service.data / "incoming").iterdir())
        assert service.state(classifier)["percent"] >= before
        service.go()
        service.wait_status(classifier, "Available")
        answer = service.get(f"/v1/classifiers/{classifier}/classify?text=hot").json()
        assert answer["top_class"] == "temperature"


def test_kill_of_the_trainer(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        classifier = service.training()
        service.trainer().kill()
        assert service.get("/livez").status_code == 200
        service.go()
        service.wait_status(classifier, "Available")
        assert service.state(classifier)["attempt"] == 2


def test_stop_lets_the_job_wait(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        classifier = service.training()
        children = service.children()
        assert service.stop() == 0
        gone(service, children)
        service.go()
        service.start()
        service.wait_status(classifier, "Available")


def begin_upload(service: ServiceProcess) -> tuple[socket.socket, bytes]:
    """A connection that has sent half of an upload, and the other half."""
    part = '--b\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    parts = part.format("training_metadata", "{}") + part.format("training_data", CSV) + "--b--\r\n"
    head = (
        "POST /v1/classifiers HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: k\r\n"
        f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {len(parts)}\r\n\r\n"
    )
    where = urlsplit(service.url)
    connection = socket.create_connection((where.hostname, where.port), timeout=120)
    cut = len(parts) - 40
    connection.sendall((head + parts[:cut]).encode())
    service.wait_for(lambda: list((service.data / "incoming").iterdir()))
    return connection, parts[cut:].encode()


def test_kill_during_an_upload(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        connection, _ = begin_upload(service)
        with connection:
            service.kill()
        service.start()
        assert not list((service.data / "incoming").iterdir())
        assert service.get("/v1/classifiers").json() == {"classifiers": []}
        again = [service.create(**{"Idempotency-Key": "k"}).json() for _ in range(2)]
        [made] = service.get("/v1/classifiers").json()["classifiers"]
        assert {one["classifier_id"] for one in again} == {made["classifier_id"]}


def test_stop_during_requests(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        trains = service.training()
        stream = service.get(f"/api/classifiers/{trains}/events", stream=True)
        connection, rest = begin_upload(service)
        service.process.send_signal(signal.SIGTERM)
        service.wait_for(lambda: " stopping" in service.log.read_text())
        with contextlib.suppress(requests.ConnectionError):  # whoever comes now is sent away
            assert service.create().status_code == 503
        with connection:
            try:  # who was there may end
                connection.sendall(rest)
                answer = connection.recv(65536)
            except ConnectionError:
                answer = b""
        with contextlib.suppress(requests.RequestException):
            assert "event: end" not in list(stream.iter_lines(decode_unicode=True))
        assert service.process.wait(LIMIT_S) == 0
        service.go()
        service.start()
        known = service.get("/v1/classifiers").json()["classifiers"]
        assert len(known) == (2 if answer.startswith(b"HTTP/1.1 200") else 1)
        service.wait_status(trains, "Available")


def test_delete_while_it_trains(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        classifier = service.training()
        [trainer] = [service.trainer()]
        jobs = trainer.children(recursive=True)
        assert jobs
        deleted = requests.delete(f"{service.url}/v1/classifiers/{classifier}", timeout=30)
        assert deleted.json() == {}
        gone(service, jobs)
        service.wait_for(lambda: not (service.data / "classifiers" / classifier).exists())
        found = subprocess.run(
            ["grep", "-r", "is it hot outside", str(service.data)], capture_output=True
        )
        assert found.returncode == 1


def test_cancel_and_retry(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        classifier = service.training(5)
        url = f"{service.url}/api/classifiers/{classifier}"
        assert requests.post(f"{url}/cancel", timeout=30).status_code == 200
        service.wait_status(classifier, "Failed")
        shown = service.get(f"/v1/classifiers/{classifier}").json()
        assert shown["status_description"] == "Training failed: it was cancelled."
        state = service.state(classifier)
        assert (state["state"], state["error"]) == ("cancelled", None)
        assert ": failed" not in service.log.read_text()
        assert requests.post(f"{url}/cancel", timeout=30).status_code == 200
        service.go()
        assert requests.post(f"{url}/retry", timeout=30).status_code == 200
        service.wait_status(classifier, "Available")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("refuse me", "Training failed: the model would be too large."),
        ("die", "Training failed: "),
    ],
)
def test_jobs_that_fail(tmp_path: Path, text: str, reason: str) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        classifier = service.created(f"{text},a\n{CSV}")
        good = service.created()
        service.wait_status(classifier, "Failed")
        shown = service.get(f"/v1/classifiers/{classifier}").json()["status_description"]
        assert shown.startswith(reason)
        service.wait_status(good, "Available")  # a poisoned job does not stop the queue


def test_versions(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        classifier = service.created()
        service.wait_status(classifier, "Available")
        url = f"{service.url}/api/classifiers/{classifier}"
        assert service.get(f"/api/classifiers/{classifier}/data").text == CSV
        other = CSV.replace("temperature", "warmth")
        parts = {"training_metadata": (None, "{}"), "training_data": (None, other)}
        assert requests.put(f"{url}/data", files=parts, timeout=30).json() == {"version": 2}

        def top() -> str:
            shown = service.get(f"/v1/classifiers/{classifier}/classify?text=hot")
            assert shown.status_code == 200  # version 1 answers meanwhile
            return shown.json()["top_class"]

        service.wait_for(lambda: top() == "warmth")
        assert requests.post(f"{url}/versions/1/activate", timeout=30).json() == {"version": 1}
        assert top() == "temperature"
        found = service.get(f"/api/classifiers/{classifier}/versions").json()["versions"]
        assert [(one["number"], one["active"]) for one in found] == [(2, False), (1, True)]


def test_events(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data", "--epochs", "5") as service:
        classifier = service.created()
        stream = service.get(f"/api/classifiers/{classifier}/events", stream=True)
        assert stream.headers["content-type"].startswith("text/event-stream")
        names, last = [], ""
        for line in stream.iter_lines(decode_unicode=True):
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
            if line.startswith("data: "):
                last = line.removeprefix("data: ")
        assert names[-1] == "end"
        assert names.count("epoch") == 5
        assert json.loads(last)["state"] == "done"


def test_postgresql(postgres: str, tmp_path: Path) -> None:
    address = postgres
    schema = f"test_{secrets.token_hex(4)}"
    with Database(address) as admin, admin.transaction() as transaction:
        transaction.run(f"CREATE SCHEMA {schema}")
    options = (
        "--database",
        f"{address}{'&' if '?' in address else '?'}options=-csearch_path%3D{schema}",
    )
    with ServiceProcess(tmp_path / "data", *options) as service:
        classifier = service.created()
        service.wait_status(classifier, "Available")
        assert service.get(f"/v1/classifiers/{classifier}/classify?text=hot").status_code == 200
        assert service.get("/metrics").status_code == 200
        service.kill()
        service.start()
        deleted = requests.delete(f"{service.url}/v1/classifiers/{classifier}", timeout=30)
        assert deleted.json() == {}
        assert service.get("/v1/classifiers").json() == {"classifiers": []}
        assert service.stop() == 0
    with Database(address) as admin, admin.transaction() as transaction:
        transaction.run(f"DROP SCHEMA {schema} CASCADE")


def test_a_second_service_on_the_directory(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        command = [
            sys.executable,
            "-m",
            "slipstream",
            "serve",
            "--data",
            str(service.data),
        ]
        second = subprocess.run(
            [*command, "--port", "0"], env=environment(), capture_output=True, text=True
        )
        assert second.returncode == 2
        assert str(service.process.pid) in second.stderr


def test_open_addresses_need_a_key(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "serve",
        "--data",
        str(tmp_path / "data"),
    ]
    refused = subprocess.run(
        [*command, "--host", "0.0.0.0", "--port", "0"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2
    assert "keys add" in refused.stderr
