"""What the service depends on fails: database, disk, clock. It says 503 and recovers by itself.

The specification's drills (§7):

=========================================== =====================================================
between model file and transaction          test_kill_between_the_model_and_the_transaction
database locked 10 s                        test_a_locked_database
PostgreSQL restarted                        test_postgresql_restarts
disk full                                   test_a_full_disk
clock set back or on by an hour             test_a_clock_that_is_set
=========================================== =====================================================
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
from service_process import ServiceProcess
from small_disk import small_disk

from postgres_server import PostgresServer, find_binaries

pytestmark = pytest.mark.process
HOUR_S = 3600


def refused(answer: requests.Response) -> None:
    """503, and when to come again."""
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"] == "Service unavailable"
    assert int(answer.headers["Retry-After"]) > 0


def top_class(service: ServiceProcess, classifier: str) -> str:
    answer = service.get(f"/v1/classifiers/{classifier}/classify?text=hot")
    assert answer.status_code == 200, answer.text
    return answer.json()["top_class"]


def epochs_told(service: ServiceProcess, classifier: str) -> list[int]:
    stream = service.get(f"/api/classifiers/{classifier}/events", stream=True)
    lines = list(stream.iter_lines(decode_unicode=True))
    return [int(line.removeprefix("id: ")) for line in lines if line.startswith("id: ")]


def nothing_half(service: ServiceProcess, *classifiers: str) -> None:
    """These are known, no other; nothing else is on disk."""
    listed = service.get("/v1/classifiers").json()["classifiers"]
    assert {one["classifier_id"] for one in listed} == set(classifiers)
    assert {one.name for one in (service.data / "classifiers").iterdir()} == set(classifiers)
    assert not list((service.data / "incoming").iterdir())


@contextlib.contextmanager
def locked(service: ServiceProcess) -> Iterator[None]:
    """Nobody else writes to the database meanwhile."""
    with contextlib.closing(sqlite3.connect(service.data / "service.db", timeout=120)) as held:
        held.isolation_level = None
        held.execute("BEGIN IMMEDIATE")
        yield
        held.execute("ROLLBACK")


def test_a_locked_database(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data", "--epochs", "20") as service:
        first = service.created()
        service.wait_status(first, "Available")
        second = service.training(10)
        with locked(service):  # each of these waits 5 s before it gives up
            refused(service.create())
            refused(requests.delete(f"{service.url}/v1/classifiers/{first}", timeout=60))
            assert top_class(service, first) == "temperature"
            service.go()
        service.wait_status(second, "Available")
        assert service.state(second)["attempt"] == 1
        assert epochs_told(service, second) == [*range(20)]  # none was lost meanwhile
        third = service.created()
        nothing_half(service, first, second, third)


def test_kill_between_the_model_and_the_transaction(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data", "--epochs", "10") as service:
        classifier = service.training()
        files = service.data / "classifiers" / classifier / "1"
        trainer = service.trainer()
        jobs = trainer.children(recursive=True)
        with locked(service):
            service.go()
            psutil.wait_procs(jobs, timeout=120)
            assert not trainer.children()
            model = (files / "model.safetensors").read_bytes()
            assert (files / "report.json").exists()
            assert service.get(f"/v1/classifiers/{classifier}").json()["status"] == "Training"
            service.kill()
        psutil.wait_procs([trainer], timeout=120)
        service.start()
        service.wait_status(classifier, "Available")
        assert (files / "model.safetensors").read_bytes() == model
        assert service.state(classifier)["attempt"] == 2
        assert top_class(service, classifier) == "temperature"


def test_a_cut_model_is_trained_again(tmp_path: Path) -> None:
    """As above, but the file does not load: never Available with it."""
    with ServiceProcess(tmp_path / "data", "--epochs", "10") as service:
        classifier = service.training()
        files = service.data / "classifiers" / classifier / "1"
        jobs = service.trainer().children(recursive=True)
        with locked(service):
            service.go()
            psutil.wait_procs(jobs, timeout=120)
            service.kill()
        (files / "model.safetensors").write_bytes(b"{")
        service.start()
        service.wait_status(classifier, "Available")
        assert top_class(service, classifier) == "temperature"


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    if (binaries := find_binaries()) is None:
        pytest.skip("needs PostgreSQL: its programs are not here")
    server = PostgresServer(binaries)
    server.start()
    yield server
    server.close()


def test_postgresql_restarts(server: PostgresServer, tmp_path: Path) -> None:
    options = ("--epochs", "20", "--database", server.address)
    with ServiceProcess(tmp_path / "data", *options) as service:
        first = service.training()
        server.stop()
        refused(service.create())
        refused(service.get("/v1/classifiers"))
        assert service.get("/livez").status_code == 200
        assert service.get("/readyz").json()["database"] is False
        jobs = service.trainer().children(recursive=True)
        service.go()
        psutil.wait_procs(jobs, timeout=120)  # the job ends while nobody can be told
        server.start()
        service.wait_status(first, "Available")
        assert service.state(first)["attempt"] == 1
        assert epochs_told(service, first) == [*range(20)]
        second = service.created()
        service.wait_status(second, "Available")
        nothing_half(service, first, second)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "200m") as disk:
        yield disk


def fill(disk: Path) -> Path:
    path = disk / "filled"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(512))
    return path


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_full_disk(
    disk: Path, kind: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SQLite cannot write then; PostgreSQL is elsewhere and can, so jobs could use up attempts."""
    options = ["--epochs", "20"]
    if kind == "postgres":
        options += ["--database", request.getfixturevalue("server").address]
    log = tmp_path_factory.mktemp("log") / "log"
    with ServiceProcess(disk / "data", *options, log=log) as service:
        first = service.created()
        service.wait_status(first, "Available")
        second = service.training()
        before = service.state(second)["percent"]
        filled = fill(disk)
        refused(service.create("".join(f"{i} {'x' * 1000},a{i % 2}\n" for i in range(2000))))
        assert service.get("/readyz").json()["disk"] is False
        assert top_class(service, first) == "temperature"
        said = "disk is full" if kind == "sqlite" else "jobs wait"
        service.go()
        service.wait_for(lambda: said in service.log.read_text())
        service.wait_for(lambda: not service.trainer().children())  # its learner cannot write
        filled.unlink()
        service.wait_status(second, "Available")
        assert service.state(second)["percent"] >= before
        nothing_half(service, first, second)


def test_a_clock_that_is_set(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    more = {"SERVICE_CLOCK": str(clock)}
    with ServiceProcess(tmp_path / "data", "--jobs", "2", env=more) as service:
        classifier = service.training(10)
        trainer = service.trainer()
        jobs = {one.pid for one in trainer.children(recursive=True)}
        for offset_s, percent in ((-HOUR_S, 30), (HOUR_S, 50)):
            clock.write_text(str(offset_s))
            service.hold(percent)
            service.reaches(classifier, percent)
            assert {one.pid for one in trainer.children(recursive=True)} <= jobs  # no second job
            assert service.state(classifier)["attempt"] == 1
        service.kill()
        service.go()
        clock.write_text("0")  # the lease of the killed one ends in an hour
        service.start()
        service.wait_for(lambda: service.state(classifier)["attempt"] == 2)
        service.wait_status(classifier, "Available")
        assert service.state(classifier)["attempt"] == 2
