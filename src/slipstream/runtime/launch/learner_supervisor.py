"""The launcher's part in a job of learners: their sockets, their memory, and the server.

Every worker of this machine has a socket to its launcher from the start. The first ``Hello`` makes
the job one of learners; a job without it is supervised as if this class did not exist.
"""

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
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import FrameRefused
from slipstream.runtime.files.directory_lock import DirectoryLocks
from slipstream.runtime.launch.process_group import ProcessGroup, log_line
from slipstream.runtime.launch.processes import inherited_environment
from slipstream.runtime.launch.supervision import Ended, Signalled, Verdict
from slipstream.runtime.shared_memory.coordinator import SharedMemoryCoordinator
from slipstream.runtime.shared_memory.messages import Body, FromLearner, FromServer, Hello
from slipstream.runtime.shared_memory.server_requests import Send
from slipstream.transports.local_socket import Hangup, LocalSocket, socket_pair
from slipstream.types import rank_of

SERVER = "server"
SERVER_COMMAND = (sys.executable, "-P", "-m", "slipstream.runtime.shared_memory.update_server")
RESTARTS = 10
SEND_S = 10.0  # limit for a process to read a message from its socket
KEEP_S = 20.0  # limit for the last checkpoint of a job that fails
TICK_S = 0.05
# Learners do not detect each other's failures; wait only for a failure that they share.
GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a worker or of the server."""

    name: str
    incarnation: int
    body: Body


class LearnerSupervisor:
    """Processes and sockets around a ``SharedMemoryCoordinator``; implements ``Supervisor``.

    Args:
        process_group: The processes of the job.
        workers: The number of workers.
        restarts: The number of times learners are started again, in all.
        locks: The directories that this job has locked.
        last: Closed when all processes of the job have ended.
    """

    tick_s = 0.5

    def __init__(
        self,
        process_group: ProcessGroup,
        workers: int,
        restarts: int,
        locks: DirectoryLocks,
        last: ExitStack,
    ) -> None:
        self._group, self._restarts = process_group, restarts
        self._locks, self._last = locks, last
        last.callback(self.close)
        self._incarnations: dict[str, int] = {}
        self._lines: dict[str, LocalSocket[Any]] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._failed_before_joining = False
        self._coordinator = SharedMemoryCoordinator(
            workers,
            self._start_server,
            lambda: self._group.end(SERVER),
            lambda rank: self._group.end(f"rank {rank}"),
            self._directory_for,
            log_line,
            self._fail,
        )

    # ---- workers

    def connect(self, name: str) -> socket.socket:
        """Return the end of a new socket for a worker that is about to start."""
        ours, theirs = socket_pair(SEND_S)
        self._coordinator.add_learner(rank_of(name), self._listen(name, ours, FromLearner))
        return theirs

    def start_again(self, name: str, incarnation: int) -> None:
        self._coordinator.restarts += 1
        with self.connect(name) as theirs:
            self._group.add_returning(name, incarnation, control=theirs.fileno())

    def expect_learners(self) -> None:
        """Continue without a leading worker from now on, and restart learners that die."""
        self._group.set_rules(leader=None, restarts=self._restarts, grace_s=GRACE_S)

    def _listen(self, name: str, end: socket.socket, bodies: Any) -> Send:
        """Start a thread that turns messages into events; return a sender."""
        if name in self._lines:
            self._lines[name].close()
        line: LocalSocket[Any] = LocalSocket(end, bodies)
        self._lines[name] = line
        incarnation = self._incarnations[name] = self._incarnations.get(name, -1) + 1

        def listen() -> None:
            with contextlib.suppress(Hangup, OSError, ValueError):
                while True:
                    try:
                        body, _ = line.receive()
                    except FrameRefused as error:
                        log_line(f"{name}: {error}")
                        line.hang_up()
                        return
                    self._group.events.put(Received(name, incarnation, body))

        threading.Thread(target=listen, daemon=True).start()

        def send(body: Body, descriptor: int | None) -> None:
            try:
                line.send(body, descriptor)
            except TimeoutError:
                log_line(f"{name} does not listen, and is ended")
                self._group.end(name)
            except Hangup:
                pass  # the end of the process is a separate event

        return send

    # ---- events

    def take(self, event: object) -> bool:
        if isinstance(event, Received):
            if event.incarnation == self._incarnations[event.name]:
                self._on_received(event)
            return True
        if isinstance(event, Ended) and event.member == SERVER:
            if not self._group.ending:
                self._coordinator.server_ended(event.code)
            return True
        if isinstance(event, Ended) and event.is_worker:
            # A learner that fails before it has joined is not noticed by the others, which wait for
            # it.
            joined = rank_of(event.member) in self._coordinator.joined
            self._failed_before_joining |= event.failed and event.place == "inside" and not joined
            self._coordinator.remove_learner(rank_of(event.member))
            if event.code == 0 and event.place == "outside" and not self._group.ending:
                self._coordinator.never_joined(rank_of(event.member))
        return False

    def _on_received(self, event: Received) -> None:
        if event.name == SERVER:
            self._coordinator.on_server_message(event.body)
            return
        if isinstance(event.body, Hello):
            self.expect_learners()
        self._coordinator.on_message(rank_of(event.name), event.body)

    def tick(self) -> None:
        if self._failed_before_joining and self._group.ending:
            self._failed_before_joining = False
            self._group.shorten_grace(GRACE_S)
        if not self._group.ending:
            self._coordinator.tick()
        if self._coordinator.finishing:
            self._group.stop_restarts()

    # ---- the server

    def _start_server(self) -> Send:
        ours, theirs = socket_pair(SEND_S)
        with theirs:
            env = inherited_environment() | {"SLIPSTREAM_CONTROL_FD": str(theirs.fileno())}
            self._server = self._group.add_helper(SERVER, SERVER_COMMAND, env, (theirs.fileno(),))
        return self._listen(SERVER, ours, FromServer)

    def save_last_checkpoint(self) -> None:
        """Wait for the checkpoint that a server writes on SIGTERM, however the job ends."""
        if self._server is None or not self._coordinator.has_weights or self._directory is not None:
            return  # nothing to save, or it would be removed with the job
        if self._server.poll() is None:
            self._group.end(SERVER, signal.SIGTERM)
        deadline = time.monotonic() + KEEP_S
        while self._server.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                if isinstance(self._group.events.get(timeout=TICK_S), Signalled):
                    return  # a second signal: do not wait
        code = self._server.poll()
        self._coordinator.lacks_checkpoint |= code != 0
        if code is None:
            log_line(f"the server has not written its last checkpoint within {KEEP_S:.0f} s")

    def final_verdict(self, verdict: Verdict) -> Verdict:
        """Return the verdict; a job without its last checkpoint has failed."""
        if verdict.code == 0 and self._coordinator.lacks_checkpoint:
            return Verdict(1, "the job ended without its last checkpoint")
        return verdict

    def _directory_for(self, requested: str | None) -> Path:
        """Return the locked directory requested, or one removed with the job."""
        if requested is not None:
            self._locks.take(Path(requested))
            return Path(requested)
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="slipstream-"))
            self._group.add_directory(self._directory)
            self._last.callback(shutil.rmtree, self._directory, ignore_errors=True)
        return self._directory

    def _fail(self, reason: str) -> None:
        log_line(reason)
        self._group.fail()

    def close(self) -> None:
        """Close the memory and all sockets."""
        self._coordinator.close()
        for line in self._lines.values():
            line.close()
