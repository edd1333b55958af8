"""What the trainer makes of jobs that end, or do not; the job is a small program here."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from slipstream.apps.service import keys, queue, trainer
from slipstream.apps.service.data_directory import DataDirectory
from slipstream.apps.service.database import Database
from slipstream.apps.service.phases import Phase, PhaseFile, phase_of
from slipstream.apps.service.progress import Progress
from slipstream.apps.service.resume import checkpoints_of, resumed_epoch
from slipstream.apps.service.serve_options import ServeOptions
from slipstream.apps.service.trainer import Running, Trainer

LIMIT_S = 120.0
ID = "0" * 6 + "x" + "0" * 10 + "-nlc-1"


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    made = DataDirectory(str(tmp_path / "data"))
    made.version(ID, 1).mkdir(parents=True)
    return made


@pytest.fixture
def database(directory: DataDirectory) -> Iterator[Database]:
    with directory.database("") as database:
        database.migrate()
        keys.add_tenant(database, keys.LOCAL, keys.LOCAL)
        row = {"id": ID, "tenant": keys.LOCAL, "language": "en", "created": 0, "serial": 1}
        database.insert("classifiers", **row)
        version = {"rows": 5, "classes": 2, "sha256": "", "created": 0, "bytes": 9}
        database.insert("versions", classifier=ID, number=1, **version)
        queue.enqueue(database, ID, 1, keys.LOCAL, 1)
        yield database


@pytest.mark.parametrize(
    ("program", "stalled_s", "reason"),
    [
        ("import time; time.sleep(600)", 0.6, "no progress in 0 minutes"),
        ("print('it broke'); print('[0] job: at update 5'); exit(1)", 600.0, "it broke"),
        ("exit(7)", 600.0, "exit status 7"),
    ],
)
def test_a_job_without_progress_fails_at_the_third_attempt(
    directory: DataDirectory,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    stalled_s: float,
    reason: str,
) -> None:
    monkeypatch.setattr(trainer, "RUN", (sys.executable, "-c", program))
    monkeypatch.setattr(trainer, "WRITE_S", 0.0)
    monkeypatch.setattr(trainer, "STALLED_S", stalled_s)
    works = Trainer(ServeOptions(data=str(directory.path)), database, directory)
    until = time.monotonic() + LIMIT_S
    while (job := database.run("SELECT * FROM jobs")[0])["state"] in ("waiting", "running"):
        assert time.monotonic() < until, job
        works._tick()
        time.sleep(0.02)
    assert (job["state"], job["error"], job["attempt"]) == ("failed", reason, 3)
    assert not (directory.version(ID, 1) / "checkpoints").exists()


def test_the_end_of_a_log_can_be_stored(tmp_path: Path) -> None:
    """PostgreSQL refuses a NUL; the trainer died of that, again and again."""
    log = tmp_path / "train.log"
    log.write_bytes(b"an earlier attempt\nit broke: \xff\0\n")
    running = SimpleNamespace(_log=log, _log_start=19)
    assert Running.log_tail(running) == "it broke: \ufffd\ufffd\n"  # type: ignore[arg-type]


def test_an_attempt_begins_with_a_line_in_the_log_and_no_phase_of_before(
    directory: DataDirectory, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "RUN", (sys.executable, "-c", ""))
    folder = directory.version(ID, 1)
    PhaseFile(folder).begin("final pass", "final pass")
    held = queue.claim(database, "me", 1)
    assert held is not None
    running = Running(held, folder, ServeOptions(data=str(directory.path), learners=2))
    running.process.wait(LIMIT_S)
    assert phase_of("running", folder) == Phase("reading rows", 0)
    assert (folder / "train.log").read_text() == "job: attempt 1 starts 2 learners\n"
    assert running.reason() == "exit status 0"  # the line is no reason


@pytest.mark.parametrize(
    ("kept", "epoch"),
    [
        (["weights-000000000812500.safetensors", "weights-000000000802500.safetensors"], 65),
        (["weights-000000000000000.safetensors"], None),
        (["curve.json"], None),
        ([], None),
    ],
)
def test_attempt_that_continues_says_from_which_epoch_at_once(
    directory: DataDirectory,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    kept: list[str],
    epoch: int | None,
) -> None:
    """By the name of the newest checkpoint; its job has read nothing so far."""
    monkeypatch.setattr(trainer, "RUN", (sys.executable, "-c", ""))
    folder = directory.version(ID, 1)
    checkpoints_of(folder).mkdir(parents=True)
    for name in kept:
        (checkpoints_of(folder) / name).touch()
    # The first line is of a whole training; the last, of one that is to stop early.
    lines = [Progress(9, 2_500_000, 0, 200, 1.0, at=1), Progress(9, 925_001, 61, 74, 1.0, at=2)]
    with (folder / "progress.jsonl").open("wb") as file:
        file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
    held = queue.claim(database, "me", 1)
    assert held is not None
    running = Running(held, folder, ServeOptions(data=str(directory.path)))
    running.process.wait(LIMIT_S)
    assert phase_of("running", folder) == Phase("reading rows", 0, epoch)


def test_checkpoint_without_progress_says_nothing(directory: DataDirectory) -> None:
    folder = directory.version(ID, 1)
    checkpoints_of(folder).mkdir(parents=True)
    (checkpoints_of(folder) / "weights-000000000812500.safetensors").touch()
    assert resumed_epoch(folder) is None
    (folder / "progress.jsonl").write_text('{"updates":')
    assert resumed_epoch(folder) is None


def test_a_job_does_not_have_the_password_of_the_database(
    directory: DataDirectory, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer has it, by which libpq finds it; a job opens no database."""
    monkeypatch.setenv("PGPASSWORD", "secret")
    monkeypatch.setattr(
        trainer, "RUN", (sys.executable, "-c", "import os; print(sorted(os.environ))")
    )
    held = queue.claim(database, "me", 1)
    assert held is not None
    running = Running(held, directory.version(ID, 1), ServeOptions(data=str(directory.path)))
    assert running.process.wait(LIMIT_S) == 0
    assert "'PATH'" in running.log_tail()
    assert "PGPASSWORD" not in running.log_tail()


def test_a_process_that_has_ended_is_signalled_once(
    directory: DataDirectory, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the database is away the end is looked at again; the number may be another's then."""
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(trainer, "RUN", (sys.executable, "-c", ""))
    held = queue.claim(database, "me", 1)
    assert held is not None
    running = Running(held, directory.version(ID, 1), ServeOptions(data=str(directory.path)))
    running.process.wait(LIMIT_S)
    monkeypatch.setattr(os, "killpg", lambda *given: signals.append(given))
    for _ in range(3):
        assert running.has_ended()
        running.end("stopped", 0.0)
    assert signals == [(running.process.pid, signal.SIGKILL)]
    assert running.ending == "stopped"
