"""Two services on one PostgreSQL; no process shows its password, or gives it to its jobs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from service_process import LIMIT_S, ServiceProcess, environment

from postgres_server import PostgresServer, find_binaries

pytestmark = pytest.mark.process
PASSWORD, METRICS_KEY = "word-of-the-database", "word-of-metrics"


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    if (binaries := find_binaries()) is None:
        pytest.skip("needs PostgreSQL: its programs are not here")
    server = PostgresServer(binaries)
    server.start()
    yield server
    server.close()


def test_a_second_service_leaves_the_work_of_the_first(
    server: PostgresServer, tmp_path: Path
) -> None:
    """The secrets of the first one come by its environment, and reach its trainer."""
    secret = server.address.replace("tests@", f"tests:{PASSWORD}@")
    env = {"SLIPSTREAM_DATABASE": secret, "SLIPSTREAM_METRICS_KEY": METRICS_KEY}
    with ServiceProcess(tmp_path / "first", env=env) as service:
        classifier = service.training()
        processes = [psutil.Process(service.process.pid), *service.children()]
        assert len(processes) > 3  # the trainer, and a job
        for process in processes:
            shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            assert shown
            assert PASSWORD.encode() not in shown
            assert METRICS_KEY.encode() not in shown
        for process in processes[1:]:
            inherited = Path(f"/proc/{process.pid}/environ").read_bytes()
            assert b"PATH=" in inherited
            assert PASSWORD.encode() not in inherited
            assert METRICS_KEY.encode() not in inherited
        assert service.get("/metrics").status_code == 401
        key = {"Authorization": f"Bearer {METRICS_KEY}"}
        assert service.get("/metrics", headers=key).status_code == 200
        second = subprocess.run(
            [
                sys.executable,
                "-m",
                "slipstream",
                "serve",
                "--data",
                "second",
                "--port",
                "0",
            ],
            env={**environment(), **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert second.returncode == 2
        assert f"another service (process {service.process.pid} on " in second.stderr
        assert PASSWORD not in second.stderr
        service.go()
        service.wait_status(classifier, "Available")
        assert service.state(classifier)["attempt"] == 1
        service.kill()
        service.start()  # at once: those of the killed one count no more
        assert service.get(f"/v1/classifiers/{classifier}").json()["status"] == "Available"


def test_a_service_that_was_away_finds_another_one(server: PostgresServer, tmp_path: Path) -> None:
    options = ("--database", server.address)
    with ServiceProcess(tmp_path / "first", *options) as first:
        away = [psutil.Process(first.process.pid), first.trainer()]
        server.stop()
        for process in away:
            process.suspend()
        server.start()
        with ServiceProcess(tmp_path / "second", *options) as second:
            for process in away:
                process.resume()
            assert first.process.wait(LIMIT_S) == 1
            assert "another service uses the database by now: process" in first.log.read_text()
            with contextlib.suppress(psutil.NoSuchProcess):
                away[1].wait(LIMIT_S)
            classifier = second.created()
            second.wait_status(classifier, "Available")
