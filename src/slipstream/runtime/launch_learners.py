"""Starting learners that share memory, and the server beside them."""

from __future__ import annotations

import contextlib
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import FrameRefused
from slipstream.runtime.crew import Crew, say
from slipstream.runtime.directory_lock import DirectoryLocks
from slipstream.runtime.exchange import rank_of
from slipstream.runtime.launch import Settings, job_environment, report
from slipstream.runtime.processes import Placement, inherited_environment
from slipstream.runtime.supervision import Ended, Limits, Signalled, Verdict
from slipstream.runtime.workshop import Tell, Workshop
from slipstream.runtime.workshop_messages import Body, FromLearner, FromServer
from slipstream.transports.local_socket import Hangup, LocalSocket, socket_pair

SERVER = "server"
SERVER_COMMAND = (sys.executable, "-P", "-m", "slipstream.runtime.update_server")
RESTARTS = 10
SEND_S = 10.0  # how long a member may leave a message in its socket
KEEP_S = 20.0  # for the last checkpoint of a job that does not end as it should
LOOK_S = 0.05
# Learners do not hear of one that fails, so there is nothing to wait for but a failure they share.
GRACE_S = 1.0


def launch_learners(
    command: Sequence[str],
    learners: int,
    *,
    settings: Settings,
    limits: Limits | None = None,
    may_lose: int = 0,
    restarts: int = RESTARTS,
    checkpoints: str | None = None,
) -> int:
    """Runs ``command`` once a learner; returns the exit code of the job, as ``launch`` does.

    The directory of ``checkpoints`` is locked before anything starts, if it is known by then: a
    script may name another one.
    """
    with ExitStack() as last:  # when nobody is left who could write
        locks = last.enter_context(DirectoryLocks(say))
        if checkpoints is not None:
            locks.take(Path(checkpoints))
        limits = limits or Limits(grace_s=GRACE_S)
        with Crew(limits, may_lose=may_lose, restarts=restarts, leader=None) as crew:
            house = LearnersHouse(crew, command, learners, settings, locks, last)
            crew.house = house
            for rank in range(learners):
                house.start(rank, life=0)
            verdict = crew.wait()
            house.keep_what_there_is()
            verdict = house.judge(verdict)
    report(verdict)
    return verdict.code


@dataclass(frozen=True, slots=True)
class Heard:
    """A message of a learner or of the server."""

    name: str
    life: int
    body: Body


class LearnersHouse:
    """Processes and sockets around a ``Workshop``; implements ``House``."""

    look_s = 0.5

    def __init__(
        self,
        crew: Crew,
        command: Sequence[str],
        learners: int,
        settings: Settings,
        locks: DirectoryLocks,
        last: ExitStack,
    ) -> None:
        self._crew, self._command, self._locks, self._last = crew, command, locks, last
        last.callback(self.close)
        self._env = job_environment(settings, workers=learners)
        self._lives: dict[str, int] = {}
        self._lines: dict[str, LocalSocket[Any]] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._workshop = Workshop(
            learners,
            self._start_server,
            self._end_server,
            self._end_learner,
            self._directory_for,
            say,
            self._fail,
        )

    def start(self, rank: int, life: int) -> None:
        name = f"rank {rank}"
        ours, theirs = socket_pair(SEND_S)
        with theirs:
            env = {
                **self._env,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "SLIPSTREAM_LIFE": str(life),
                "SLIPSTREAM_CONTROL_FD": str(theirs.fileno()),
            }
            if rank > 0:
                env.setdefault("PYTHONUNBUFFERED", "1")
            self._crew.add_worker(
                name,
                self._command,
                env,
                Placement(),
                has_terminal=rank == 0 and life == 0,
                pass_fds=(theirs.fileno(),),
            )
        self._workshop.seat(rank, self._listen(name, ours, FromLearner))

    def start_again(self, name: str, life: int) -> None:
        self._workshop.restarts += 1
        self.start(rank_of(name), life)

    def _listen(self, name: str, end: socket.socket, bodies: Any) -> Tell:
        """A thread turns what comes into events; returns how to answer."""
        if name in self._lines:
            self._lines[name].close()
        line: LocalSocket[Any] = LocalSocket(end, bodies)
        self._lines[name] = line
        life = self._lives[name] = self._lives.get(name, -1) + 1

        def listen() -> None:
            with contextlib.suppress(Hangup, OSError, ValueError):
                while True:
                    try:
                        body, _ = line.receive()
                    except FrameRefused as error:
                        say(f"{name}: {error}")
                        line.hang_up()
                        return
                    self._crew.events.put(Heard(name, life, body))

        threading.Thread(target=listen, daemon=True).start()

        def tell(body: Body, descriptor: int | None = None) -> None:
            try:
                line.send(body, descriptor)
            except TimeoutError:
                say(f"{name} does not listen, and is ended")
                self._crew.end(name)
            except Hangup:
                pass  # its end is an event of its own

        return tell

    # ---- events

    def take(self, event: object) -> bool:
        if isinstance(event, Heard):
            if event.life == self._lives[event.name]:
                if event.name == SERVER:
                    self._workshop.hear_server(event.body)
                else:
                    self._workshop.hear(rank_of(event.name), event.body)
            return True
        if isinstance(event, Ended) and event.member == SERVER:
            if not self._crew.ending:
                self._workshop.server_ended(event.code)
            return True
        if isinstance(event, Ended) and event.is_worker:
            self._workshop.leave(rank_of(event.member))
            if event.code == 0 and event.place == "outside" and not self._crew.ending:
                self._workshop.stayed_away(rank_of(event.member))
        return False

    def look(self) -> None:
        if not self._crew.ending:
            self._workshop.look()
        if self._workshop.finishing:
            self._crew.restart_nobody()

    # ---- the server

    def _start_server(self) -> Tell:
        ours, theirs = socket_pair(SEND_S)
        with theirs:
            env = inherited_environment() | {"SLIPSTREAM_CONTROL_FD": str(theirs.fileno())}
            self._server = self._crew.add_helper(SERVER, SERVER_COMMAND, env, (theirs.fileno(),))
        return self._listen(SERVER, ours, FromServer)

    def _end_server(self) -> None:
        self._crew.end(SERVER)

    def _end_learner(self, rank: int) -> None:
        self._crew.end(f"rank {rank}")

    def keep_what_there_is(self) -> None:
        """However the job ends: SIGTERM makes a server keep a checkpoint and go."""
        if self._server is None or not self._workshop.has_weights or self._directory is not None:
            return  # there is nothing to keep, or it would go with the job
        if self._server.poll() is None:
            self._crew.end(SERVER, signal.SIGTERM)
        deadline = time.monotonic() + KEEP_S
        while self._server.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                if isinstance(self._crew.events.get(timeout=LOOK_S), Signalled):
                    return  # somebody is impatient
        if self._server.poll():
            self._workshop.lacks_checkpoint = True
        if self._server.poll() is None:
            self._workshop.lacks_checkpoint = True
            say(f"the server has not written its last checkpoint within {KEEP_S:.0f} s")

    def judge(self, verdict: Verdict) -> Verdict:
        """A job that lacks its last checkpoint has not ended well."""
        if verdict.code == 0 and self._workshop.lacks_checkpoint:
            return Verdict(1, "the job ended without its last checkpoint")
        return verdict

    def _directory_for(self, asked: str | None) -> Path:
        """The directory that learners ask for, locked; else one that goes with the job."""
        if asked is not None:
            self._locks.take(Path(asked))
            return Path(asked)
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="slipstream-"))
            self._crew.add_directory(self._directory)
            self._last.callback(shutil.rmtree, self._directory, ignore_errors=True)
        return self._directory

    def _fail(self, trouble: str) -> None:
        say(trouble)
        self._crew.give_up()

    def close(self) -> None:
        self._workshop.close()
        for line in self._lines.values():
            line.close()
