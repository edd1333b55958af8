"""The trainer: claims jobs, runs each as ``slipstream run`` of its own, and watches it.

A process of its own, started by the API process and killed with it. It writes bytes to its
standard output, one a second at least; the API process takes that for its pulse.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from slipstream.runtime.files.whole_files import replace_file
from slipstream.runtime.launch.processes import Placement, inherited_environment, start_process
from slipstream.service import queue
from slipstream.service.answers import Model
from slipstream.service.data_directory import DataDirectory, remove
from slipstream.service.database import Database, DatabaseUnavailable, now_ms, sqlite_path
from slipstream.service.refusals import Damaged
from slipstream.service.serve_options import KEPT_VERSIONS, MIB, ServeOptions
from slipstream.service.settings import JobSetting

LOG = logging.getLogger("slipstream.service.trainer")
TICK_S: Final = 0.25
WRITE_S: Final = 1.0
STOP_S: Final = 20.0
CANCEL_S: Final = 3.0
LOG_TAIL_NBYTES: Final = 8192
PROGRESS_NBYTES: Final = MIB
ROOM_NBYTES: Final = 64 * MIB  # that have to be free for a job to begin
REFUSED: Final = re.compile(r"refused: (.{1,500})")


class Running:
    """A job's processes and its place in ``progress.jsonl``."""

    def __init__(self, held: queue.Claim, directory: Path, options: ServeOptions) -> None:
        self.held = held
        self.directory = directory
        self.ending: str | None = None  # "stopped" or "lost", once its processes are to end
        self.best = held.resumed_from
        self._unrecorded: list[queue.Progress] = []
        self._kill_at = float("inf")
        job = JobSetting(epochs=options.epochs, max_model_bytes=options.max_model)
        replace_file(directory / "job.json", [msgspec.json.encode(job)])
        progress = directory / "progress.jsonl"
        self._offset = progress.stat().st_size if progress.exists() else 0
        log = os.open(
            directory / "train.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        try:
            self.log_start = os.fstat(log).st_size
            self.process = start_process(
                learn_command(directory, options.learners),
                inherited_environment(),
                Placement(("nice", "-n", "10")),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        finally:
            os.close(log)

    def progress(self) -> list[queue.Progress]:
        """The whole lines that are not recorded yet: a database that is away loses none."""
        try:
            with (self.directory / "progress.jsonl").open("rb") as file:
                file.seek(self._offset)
                block = file.read(PROGRESS_NBYTES)
        except OSError:
            return self._unrecorded
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(msgspec.DecodeError):  # a kill may cut a line
                self._unrecorded.append(msgspec.json.decode(line, type=queue.Progress))
        self.best = max([self.best, *(line.updates for line in self._unrecorded)])
        return self._unrecorded

    def recorded(self) -> None:
        """The database has all lines of the last call."""
        self._unrecorded = []

    def end(self, why: str, grace_s: float) -> None:
        """Ask its processes to end; they are killed after ``grace_s``."""
        if self.ending is None:
            self.ending = why
            self._kill_at = time.monotonic() + grace_s
            self._signal(signal.SIGTERM)

    def has_ended(self) -> bool:
        """Whether the process is gone; kills it if its time is over."""
        if self.process.poll() is not None:
            self._signal(signal.SIGKILL)  # whatever is left of its session
            return True
        if time.monotonic() >= self._kill_at:
            self._signal(signal.SIGKILL)
        return False

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def log_tail(self) -> str:
        """The end of this attempt's log."""
        with contextlib.suppress(OSError), (self.directory / "train.log").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.log_start, size - LOG_TAIL_NBYTES))
            return file.read(LOG_TAIL_NBYTES).decode("utf-8", "replace")
        return ""


def learn_command(directory: Path, learners: int) -> list[str]:
    """How a version is trained."""
    strategy = f"gadei(checkpoints={str(directory / 'checkpoints')!r}, every_s=10)"
    program = [sys.executable, "-P", "-m", "slipstream.cli", "run"]
    options = ["--workers", str(learners), "--strategy", strategy]
    return [*program, *options, "-m", "slipstream.service.learn", str(directory)]


class Trainer:
    """Claims jobs and sees them to their end.

    Args:
        options: The service's.
        database: Where the queue is.
        directory: Where the files are.
    """

    def __init__(self, options: ServeOptions, database: Database, directory: DataDirectory) -> None:
        self._options = options
        self._database = database
        self._directory = directory
        self._me = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._running: list[Running] = []
        self._written = 0.0
        self._had_room = True
        self.stopping = threading.Event()

    def run(self) -> None:
        """Work until ``stopping`` is set; then let the jobs wait again."""
        while not self.stopping.is_set() or self._running:
            os.write(1, b".")
            try:
                self._tick()
            except DatabaseUnavailable as error:
                LOG.warning("%s", error)  # the jobs go on; the next tick tries again
                self.stopping.wait(WRITE_S)
            if self.stopping.is_set():
                for running in self._running:
                    running.end("stopped", STOP_S)
                time.sleep(TICK_S)
            else:
                self.stopping.wait(TICK_S)

    def _tick(self) -> None:
        for running in list(self._running):
            if running.has_ended():
                self._settle(running)
                self._running.remove(running)
        if time.monotonic() - self._written < WRITE_S:
            return
        self._written = time.monotonic()
        for running in self._running:
            self._report(running)
        self._purge()
        full = self.stopping.is_set() or len(self._running) >= self._options.jobs
        if not full and self._has_room():
            self._claim()

    def _report(self, running: Running) -> None:
        lines = running.progress()
        with self._database.transaction() as transaction:
            alive = queue.beat(transaction, running.held, now_ms())
            if alive and lines:
                queue.record(transaction, running.held, lines)
        if alive:
            running.recorded()
        else:
            running.end("lost", CANCEL_S)

    def _claim(self) -> None:
        with self._database.transaction() as transaction:
            held = queue.claim(transaction, self._me, now_ms())
        if held is None:
            return
        directory = self._directory.version(held.classifier, held.version)
        LOG.info("job %s of %s: attempt %d", held.id, held.classifier, held.attempt)
        if _is_complete(directory):  # a kill came between the model and the transaction
            self._done(held, directory)
        elif held.fruitless >= queue.FRUITLESS_ATTEMPTS:
            self._fail(held, "its processes were killed again and again without any progress")
        else:
            try:
                self._running.append(Running(held, directory, self._options))
            except OSError as error:
                LOG.warning("job %s cannot start: %s", held.id, error.strerror)
                self._release(held, blameless=True)

    def _settle(self, running: Running) -> None:
        """A job's processes have ended: decide what that means."""
        held = running.held
        if lines := running.progress():
            with self._database.transaction() as transaction:
                queue.record(transaction, held, lines)
            running.recorded()
        code = running.process.returncode
        if code == 0 and _is_complete(running.directory):
            self._done(held, running.directory)
        elif running.ending == "stopped":
            self._release(held, blameless=True)
        elif running.ending == "lost":
            self._fail(held, "cancelled")
        elif refusal := REFUSED.search(tail := running.log_tail()):
            self._fail(held, refusal[1])
        elif not self._has_room():
            self._release(held, blameless=True)
        elif queue.is_poisoned(held.fruitless, held.resumed_from, running.best):
            lines_of_log = [line for line in tail.splitlines() if line.strip()]
            self._fail(held, lines_of_log[-1][:500] if lines_of_log else f"exit status {code}")
        else:
            LOG.warning("job %s ended with %s; it is tried again", held.id, code)
            self._release(held, blameless=False)

    def _done(self, held: queue.Claim, directory: Path) -> None:
        values = {"id": held.classifier, "version": held.version}
        with self._database.transaction() as transaction:
            if not queue.finish(transaction, held, "done", None, now_ms()):
                return
            transaction.run("UPDATE classifiers SET active = :version WHERE id = :id", values)
            transaction.run(
                "UPDATE versions SET report = :accuracy"
                " WHERE classifier = :id AND number = :version",
                {**values, "accuracy": _accuracy(directory)},
            )
            old = transaction.run(
                "DELETE FROM versions WHERE classifier = :id AND number <= :version - :kept"
                " RETURNING number",
                {**values, "kept": KEPT_VERSIONS},
            )
        LOG.info("job %s of %s: done", held.id, held.classifier)
        remove(directory / "checkpoints")
        for row in old:
            remove(self._directory.version(held.classifier, row["number"]))

    def _fail(self, held: queue.Claim, reason: str) -> None:
        with self._database.transaction() as transaction:
            queue.finish(transaction, held, "failed", reason, now_ms())
        LOG.warning("job %s of %s: failed: %s", held.id, held.classifier, reason)

    def _release(self, held: queue.Claim, *, blameless: bool) -> None:
        with self._database.transaction() as transaction:
            queue.release(transaction, held, blameless=blameless)

    def _has_room(self) -> bool:
        """Whether jobs can write. What ends on a full disk is not to blame, and waits."""
        room = self._directory.free_nbytes() >= ROOM_NBYTES
        if self._had_room and not room:
            LOG.warning("less than %d MiB are free: jobs wait", ROOM_NBYTES // MIB)
        self._had_room = room
        return room

    def _purge(self) -> None:
        """Remove the files of deleted classifiers, once none of their processes lives."""
        with self._database.reading() as reading:
            paths = {row["path"] for row in reading.run("SELECT path FROM purges")}
        for path in paths - {running.held.classifier for running in self._running}:
            remove(self._directory.classifier(path))
            with self._database.transaction() as transaction:
                transaction.run("DELETE FROM purges WHERE path = :path", {"path": path})


def _is_complete(directory: Path) -> bool:
    """Whether a model is there that loads, and its report."""
    if not (directory / "report.json").exists():
        return False
    try:
        Model.load(directory / "model.safetensors")
    except (Damaged, OSError):
        return False
    return True


def _accuracy(directory: Path) -> float | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        report = msgspec.json.decode((directory / "report.json").read_bytes())
        found = report.get("accuracy") if isinstance(report, dict) else None
        found = found.get("value") if isinstance(found, dict) else found
        return float(found) if isinstance(found, int | float) else None
    return None


def main() -> None:
    """``python -m slipstream.service.trainer OPTIONS``, as the API process starts it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    os.umask(0o077)
    options = msgspec.json.decode(sys.argv[1], type=ServeOptions)
    directory = DataDirectory(options.data)
    with Database(options.database or sqlite_path(directory.path)) as database:
        trainer = Trainer(options, database, directory)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: trainer.stopping.set())
        trainer.run()


if __name__ == "__main__":
    main()
