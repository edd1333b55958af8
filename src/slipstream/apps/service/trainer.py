"""The trainer: claims jobs, runs each as ``slipstream run`` of its own, and watches it.

A process of its own, started by the API process and killed with it. It writes bytes to its
standard output, every second or two; the API process takes that for its pulse.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from slipstream.apps.service import phases, queue
from slipstream.apps.service.answers import Model
from slipstream.apps.service.data_directory import MODEL, DataDirectory, remove
from slipstream.apps.service.database import Database, DatabaseUnavailable, Replaced, now_ms
from slipstream.apps.service.errors import Damaged
from slipstream.apps.service.pace import Pace
from slipstream.apps.service.progress import FILE, NOTE, Progress
from slipstream.apps.service.resume import checkpoints_of, resumed_epoch
from slipstream.apps.service.serve_options import MIB, ServeOptions, TrainerStart
from slipstream.apps.service.settings import JobSetting
from slipstream.errors import LaunchError
from slipstream.runtime.files.whole_files import replace_file
from slipstream.runtime.launch.processes import Placement, inherited_environment, start_process

LOG = logging.getLogger("slipstream.apps.service.trainer")
TICK_S: Final = 0.25
WRITE_S: Final = 1.0
STOP_S: Final = 20.0
CANCEL_S: Final = 3.0
STALLED_S: Final = 900.0  # without a line of progress; reading 20,000 rows takes less
LOG_TAIL_NBYTES: Final = 8192
ROOM_NBYTES: Final = 64 * MIB  # that have to be free for a job to begin
RUN: Final = (sys.executable, "-P", "-m", "slipstream", "run")
REFUSED: Final = re.compile(r"refused: (.{1,500})")


class _Result(msgspec.Struct):
    accuracy: float | None


class Running:
    """A job's processes and its place in ``progress.jsonl``."""

    def __init__(self, held: queue.Claim, directory: Path, options: ServeOptions) -> None:
        self.held, self.directory = held, directory
        # "stopped", "stalled" or "lost", once its processes are to end
        self.ending: str | None = None
        self.news_at = time.monotonic()  # when the last line of progress was read
        self.best, self.pace = held.resumed_from, Pace()
        self.unwritten: list[Progress] = []
        self._kill_at, self._gone = float("inf"), False
        job = JobSetting(
            epochs=options.epochs, max_model_bytes=options.max_model, cut_to=held.cut_to
        )
        replace_file(directory / "job.json", [msgspec.json.encode(job)])
        (directory / phases.FILE).unlink(missing_ok=True)  # of an earlier attempt
        if (epoch := resumed_epoch(directory)) is not None:
            phases.write_phase(directory, phases.Phase(phases.READING, 0, epoch))
        self._progress, self._log = directory / FILE, directory / "train.log"
        self._offset = self._progress.stat().st_size if self._progress.exists() else 0
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            log.write(f"{NOTE}attempt {held.attempt} starts {options.learners} learners\n".encode())
            log.flush()
            checkpoints = checkpoints_of(directory)
            checkpoints.mkdir(parents=True, exist_ok=True)
            strategy = f"gadei(checkpoints={str(checkpoints)!r}, every_s=10)"
            environment = inherited_environment()
            environment.pop("PGPASSWORD", None)  # of the trainer's own connection
            workers = ["--workers", str(options.learners), "--strategy", strategy]
            self.process = start_process(
                [*RUN, *workers, "-m", "slipstream.apps.service.learn", str(directory)],
                environment,
                Placement(("nice", "-n", "10")),
                stdin=subprocess.DEVNULL,
                stdout=log.fileno(),
                stderr=log.fileno(),
            )

    def read_progress(self) -> None:
        """Take the whole lines since the last call; the pace is by the lines of this attempt."""
        with contextlib.suppress(FileNotFoundError), self._progress.open("rb") as file:
            file.seek(self._offset)
            block = file.read(MIB)
            whole = block[: block.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(msgspec.DecodeError):  # a kill may cut a line
                    self.unwritten.append(found := msgspec.json.decode(line, type=Progress))
                    self.pace.add(at=found.at, updates=found.updates)
        if self.unwritten:
            self.news_at = time.monotonic()
            self.best = max([self.best, *(line.updates for line in self.unwritten)])

    def end(self, why: str, grace_s: float) -> None:
        """Ask its processes to end; they are killed after ``grace_s``."""
        if self.ending is None:
            self.ending, self._kill_at = why, time.monotonic() + grace_s
            self._signal(signal.SIGTERM)

    def has_ended(self) -> bool:
        """Whether the process is gone. Kills what is left of it, or if its time is over."""
        ended = self.process.poll() is not None
        if ended or time.monotonic() >= self._kill_at:
            self._signal(signal.SIGKILL)
        self._gone = ended
        return ended

    def _signal(self, number: int) -> None:
        if self._gone:  # its number may be another process's by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def reason(self) -> str:
        """Why it ended without a model."""
        if self.ending == "stalled":
            return f"no progress in {STALLED_S / 60:.0f} minutes"
        lines = self.log_tail().splitlines()
        said = [line for line in lines if line.strip() and NOTE not in line]
        return said[-1][:500] if said else f"exit status {self.process.returncode}"

    def log_tail(self) -> str:
        """The end of this attempt's log, without what PostgreSQL cannot store."""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - LOG_TAIL_NBYTES))
            return file.read(LOG_TAIL_NBYTES).decode("utf-8", "replace").replace("\0", "\ufffd")
        return ""


class Trainer:
    """Claims jobs and sees them to their end."""

    def __init__(self, options: ServeOptions, database: Database, directory: DataDirectory) -> None:
        self._options, self._database, self._directory = options, database, directory
        self._me = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._running: list[Running] = []
        self._written, self._had_room, self.stopping = 0.0, True, False

    def run(self) -> None:
        """Work until ``stopping`` is set; then let the jobs wait again."""
        while not self.stopping or self._running:
            os.write(1, b".")
            for running in self._running if self.stopping else ():
                running.end("stopped", STOP_S)
            try:
                self._tick()
            except Replaced:
                raise
            except DatabaseUnavailable as error:
                LOG.warning("%s", error)  # the jobs go on; the next tick tries again
                time.sleep(WRITE_S)
            time.sleep(TICK_S)

    def _tick(self) -> None:
        for running in list(self._running):
            if running.has_ended():
                self._settle(running)
                self._running.remove(running)
        if time.monotonic() - self._written < WRITE_S:
            return
        self._written = time.monotonic()
        for running in self._running:
            if not self._record(running):
                running.end("lost", CANCEL_S)
            elif time.monotonic() - running.news_at > STALLED_S:
                running.end("stalled", STOP_S)
        self._purge()
        full = self.stopping or len(self._running) >= self._options.jobs
        if not full and self._has_room():
            self._claim()

    def _record(self, running: Running) -> bool:
        """Write a job's progress and extend its lease; False if it was cancelled or deleted."""
        running.read_progress()
        with self._database.transaction() as database:
            if running.unwritten:
                queue.record(database, running.held, running.unwritten, running.pace.updates_s)
            alive = queue.beat(database, running.held, now_ms())
        running.unwritten = []
        return alive

    def _claim(self) -> None:
        with self._database.transaction() as database:
            held = queue.claim(database, self._me, now_ms())
        if held is None:
            return
        directory = self._directory.version(held.classifier, held.version)
        LOG.info("job %s of %s: attempt %d", held.id, held.classifier, held.attempt)
        if result := _result(directory):  # a kill came between the model and the transaction
            self._done(held, result)
        elif held.fruitless >= queue.FRUITLESS_ATTEMPTS:
            self._fail(held, "its processes were killed again and again without any progress")
        else:
            try:
                self._running.append(Running(held, directory, self._options))
            except (OSError, LaunchError) as error:
                LOG.warning("job %s cannot start: %s", held.id, error)
                queue.release(self._database, held, now_ms(), blameless=True)

    def _settle(self, running: Running) -> None:
        """A job's processes have ended: decide what that means."""
        held, code = running.held, running.process.returncode
        self._record(running)
        if code == 0 and (result := _result(running.directory)):
            self._done(held, result)
        elif running.ending == "stopped":
            queue.release(self._database, held, now_ms(), blameless=True)
        elif running.ending == "lost":
            self._fail(held, "cancelled")
        elif refusal := REFUSED.search(running.log_tail()):
            self._fail(held, refusal[1])
        elif not self._has_room():
            queue.release(self._database, held, now_ms(), blameless=True)
        elif queue.is_poisoned(held.fruitless, held.resumed_from, running.best):
            self._fail(held, running.reason())
        else:
            LOG.warning("job %s: %s; it is tried again", held.id, running.reason())
            queue.release(self._database, held, now_ms(), blameless=False)

    def _done(self, held: queue.Claim, result: _Result) -> None:
        version = {"id": held.classifier, "version": held.version}
        with self._database.transaction() as database:
            if not queue.finish(database, held, "done", None, now_ms()):
                return
            database.run("UPDATE classifiers SET active = :version WHERE id = :id", **version)
            database.run(
                "UPDATE versions SET report = :accuracy"
                " WHERE classifier = :id AND number = :version",
                accuracy=result.accuracy,
                **version,
            )
            old = queue.prune(database, held.classifier)
        LOG.info("job %s of %s: done", held.id, held.classifier)
        remove(self._directory.version(held.classifier, held.version) / "checkpoints")
        for number in old:
            remove(self._directory.version(held.classifier, number))

    def _fail(self, held: queue.Claim, reason: str) -> None:
        queue.finish(self._database, held, "failed", reason, now_ms())
        LOG.warning("job %s of %s ended: %s", held.id, held.classifier, reason)
        # If it is tried again, it begins anew.
        remove(self._directory.version(held.classifier, held.version) / "checkpoints")

    def _has_room(self) -> bool:
        """Whether jobs can write. What ends on a full disk is not to blame, and waits."""
        room = self._directory.free_nbytes() >= ROOM_NBYTES
        if self._had_room and not room:
            LOG.warning("less than %d MiB are free: jobs wait", ROOM_NBYTES // MIB)
        self._had_room = room
        return room

    def _purge(self) -> None:
        """Remove the files of deleted classifiers, once none of their processes lives."""
        paths = {row["path"] for row in self._database.run("SELECT path FROM purges")}
        for path in paths - {running.held.classifier for running in self._running}:
            remove(self._directory.classifiers / path)
            self._database.run("DELETE FROM purges WHERE path = :path", path=path)


def _result(directory: Path) -> _Result | None:
    """What a version reached; None if it has no model that loads, or no report."""
    try:
        Model.load(directory / MODEL)
        return msgspec.json.decode((directory / "report.json").read_bytes(), type=_Result)
    except (Damaged, OSError, ValueError):
        return None


def main() -> None:
    """``python -m slipstream.apps.service.trainer``, as the API process starts it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    os.umask(0o077)
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=TrainerStart)
    directory = DataDirectory(start.options.data)
    with directory.database(start.options.database, start.owner) as database:
        trainer = Trainer(start.options, database, directory)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(trainer, "stopping", True))
        try:
            trainer.run()
        except Replaced as error:  # its jobs end with it
            sys.exit(str(error))


if __name__ == "__main__":
    main()
