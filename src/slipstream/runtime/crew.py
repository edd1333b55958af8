"""The processes of one job on this machine: started, heard, stopped, cleared away."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from slipstream.errors import WaitLimit
from slipstream.printable import printable_lines
from slipstream.runtime import guardian
from slipstream.runtime.presence import place_of
from slipstream.runtime.processes import (
    SERVER_STOP_S,
    Placement,
    ServerProcess,
    start_process,
)
from slipstream.runtime.relay import start_relay
from slipstream.runtime.supervision import (
    JOB,
    CameBack,
    Ended,
    Limits,
    Signalled,
    Supervision,
    Verdict,
)

# For the last lines of members that have ended; a stray process may hold their pipes open.
OUTPUT_S = 1.0


class House(Protocol):
    """A job in which the launcher itself has something to do."""

    look_s: float

    def take(self, event: object) -> bool:
        """Whether an event was its own business."""

    def look(self) -> None:
        """Called every ``look_s`` seconds, and after every event."""

    def start_again(self, name: str, life: int) -> None: ...


class Crew:
    """Members are added one by one; leaving the ``with`` block leaves none of them behind."""

    def __init__(
        self,
        limits: Limits,
        *,
        may_lose: int = 0,
        restarts: int = 0,
        leader: str | None = "rank 0",
    ) -> None:
        self._limits = limits
        self.house: House | None = None
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._watch = Supervision(limits, time.monotonic, may_lose, restarts, leader)
        self._starts: dict[str, tuple[Sequence[str], Mapping[str, str], Placement]] = {}
        self._groups: dict[str, guardian.ChildGroup] = {}
        self._servers: list[ServerProcess] = []
        self._helpers: set[str] = set()
        self._output: list[threading.Thread] = []
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Crew:
        self._cleanup.enter_context(_signals_into(self.events))
        self._guardian, self._guardian_socket = _start_guardian()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._cleanup:
            self._kill_workers(signal.SIGKILL, {*self._watch.running, *self._helpers})
            self._close_servers()
            guardian.sweep(self._groups.values())
            self._finish_output()
            self._dismiss_guardian()
            for group in self._groups.values():
                group.close()

    def add_worker(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        placement: Placement,
        *,
        has_terminal: bool,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Starts a worker, on our own stdin, stdout and stderr or with its lines under its name."""
        piped = subprocess.PIPE
        presence, theirs = os.pipe()
        try:
            process = start_process(
                command,
                {**env, "SLIPSTREAM_PRESENCE_FD": str(theirs)},
                placement,
                stdin=None if has_terminal else subprocess.DEVNULL,
                stdout=None if has_terminal else piped,
                stderr=None if has_terminal else piped,
                pass_fds=(*pass_fds, theirs),
            )
        except BaseException:
            os.close(presence)
            raise
        finally:
            os.close(theirs)
        self._watch.started(name)
        self._starts.setdefault(name, (command, env, placement))
        self._add(name, process, presence)
        for stream, fd in ((process.stdout, 1), (process.stderr, 2)):
            if stream is not None:
                self._output.append(start_relay(stream, f"[{name}] ", fd))

    def add_server(self, server: ServerProcess) -> None:
        self._servers.append(server)
        self._add(server.name, server.process)

    def add_helper(
        self, name: str, command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        """Starts a process that is no worker: the house hears of its end, and ends it."""
        process = start_process(
            command,
            env,
            Placement(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
        )
        self._helpers.add(name)
        self._add(name, process)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            self._output.append(start_relay(stream, f"[{name}] ", 2))
        return process

    def add_directory(self, directory: Path) -> None:
        """Goes with this process, should it be killed."""
        with contextlib.suppress(OSError):
            guardian.announce_directory(self._guardian_socket, directory)

    def end(self, name: str, signum: signal.Signals = signal.SIGKILL) -> None:
        self._kill_workers(signum, [name])

    def give_up(self) -> None:
        """The job cannot go on, and the house has said why. Only the main thread calls this."""
        self._watch.take(Ended(JOB, 1))

    def restart_nobody(self) -> None:
        """All are about to end: who dies now has no place to come back to."""
        self._watch.over = True

    @property
    def ending(self) -> bool:
        """Whether something has failed, or somebody has asked for the end."""
        return self._watch.ending

    def servers_announced(self) -> bool:
        """Waits until every server has its address; False if the job is over before that."""
        limit_s = self._limits.server_start_s
        deadline = time.monotonic() + limit_s
        while missing := [s.name for s in self._servers if not s.announced(timeout_s=0.05)]:
            self._handle_next(time.monotonic())
            if self._watch.ending:
                return False
            if time.monotonic() > deadline:
                raise WaitLimit("servers to say where they listen", limit_s, missing)
        return True

    def wait(self) -> Verdict:
        """Returns when all workers have ended, by themselves or because they had to."""
        while self._watch.running:
            until = self._watch.deadline
            if self.house is not None:
                until = min(until, time.monotonic() + self.house.look_s)
            self._handle_next(until)
            if self.house is not None:
                self.house.look()
            if time.monotonic() >= self._watch.deadline:
                if not self._watch.ending:
                    late = ", ".join(sorted(self._watch.condemned))
                    say(f"{late} came back too late: the others have finished")
                self._kill_workers(self._watch.press(), self._watch.condemned)
        return self._watch.verdict()

    def _add(
        self, name: str, process: subprocess.Popen[bytes], presence: int | None = None
    ) -> None:
        group = guardian.ChildGroup.led_by(process.pid)  # before the thread below can reap it
        if name in self._groups:
            self._groups[name].close()
        self._groups[name] = group
        with contextlib.suppress(OSError):
            guardian.announce_group(self._guardian_socket, group)
        watched = (name, process, presence)
        threading.Thread(target=self._watch_exit, args=watched, daemon=True).start()

    def _watch_exit(
        self, name: str, process: subprocess.Popen[bytes], presence: int | None
    ) -> None:
        code = process.wait()
        if presence is None:
            self.events.put(Ended(name, code))
            return
        with os.fdopen(presence, "rb"):
            self.events.put(Ended(name, code, place_of(presence)))

    def _handle_next(self, deadline: float) -> None:
        remaining_s = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
        lost, replaced = len(self._watch.lost), len(self._watch.replaced)
        with contextlib.suppress(queue.Empty):
            event = self.events.get(timeout=remaining_s)
            if self.house is not None and self.house.take(event):
                return
            assert isinstance(event, Ended | CameBack | Signalled)
            signum = self._watch.take(event)
            self._kill_workers(signum, self._watch.condemned)
        for ended in self._watch.lost[lost:]:
            say(f"{ended}; the others go on")
        for ended in self._watch.replaced[replaced:]:
            say(f"{ended}; it is started again")
            self._start_again(ended.member)

    def _start_again(self, name: str) -> None:
        guardian.sweep([self._groups[name]])  # what the old one has left behind
        life = sum(ended.member == name for ended in self._watch.replaced)
        if self.house is not None:
            self.house.start_again(name, life)
            return
        command, env, placement = self._starts[name]
        heard, told = os.pipe()
        again = {**env, "SLIPSTREAM_LIFE": str(life), "SLIPSTREAM_BACK_FD": str(told)}
        try:
            self.add_worker(name, command, again, placement, has_terminal=False, pass_fds=(told,))
        finally:
            os.close(told)
        threading.Thread(target=self._await_return, args=(name, heard), daemon=True).start()

    def _await_return(self, name: str, heard: int) -> None:
        """A worker that is back writes a byte; one that never comes back ends without."""
        with os.fdopen(heard, "rb") as told:
            if told.read(1):
                self.events.put(CameBack(name))

    def _kill_workers(self, signum: signal.Signals | None, members: Collection[str]) -> None:
        if signum is None:
            return
        for name in members:
            self._groups[name].send(signum)

    def _close_servers(self) -> None:
        for server in self._servers:
            server.dismiss()
        deadline = time.monotonic() + SERVER_STOP_S
        for server in self._servers:
            server.close(max(0.0, deadline - time.monotonic()))

    def _finish_output(self) -> None:
        deadline = time.monotonic() + OUTPUT_S
        for thread in self._output:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _dismiss_guardian(self) -> None:
        with self._guardian_socket, contextlib.suppress(OSError):
            guardian.announce_end(self._guardian_socket)
        self._guardian.wait()


def say(line: str) -> None:
    """A word of the launcher's own, beside what the workers print."""
    with contextlib.suppress(OSError):  # the terminal has gone, which is often why we are here
        sys.stderr.write(printable_lines(f"slipstream: {line}\n"))
        sys.stderr.flush()


def _start_guardian() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guardian.__file__))],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    return process, ours


@contextlib.contextmanager
def _signals_into(events: queue.SimpleQueue[object]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP become events; under ``nohup`` SIGHUP stays ignored."""
    previous = {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signum is signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
            continue
        previous[signum] = signal.signal(signum, lambda got, _: events.put(Signalled(got)))
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
