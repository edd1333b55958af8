"""The processes of one job on this machine: starts, watches, stops and removes them."""

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
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from slipstream.errors import WaitLimit
from slipstream.printable import printable_lines
from slipstream.runtime.launch import guardian
from slipstream.runtime.launch.presence import PresenceReader
from slipstream.runtime.launch.processes import (
    SERVER_STOP_S,
    Placement,
    ServerProcess,
    start_process,
)
from slipstream.runtime.launch.relay import Relay, start_relay
from slipstream.runtime.launch.supervision import (
    JOB,
    CameBack,
    Ended,
    Limits,
    Signalled,
    Supervision,
    Verdict,
)

# Variables with numbers of descriptors, which are valid only in the process that got them.
DESCRIPTORS = frozenset({"SLIPSTREAM_STORE_FD", "SLIPSTREAM_CONTROL_FD"})
# Limit for the last lines of ended processes, without the time in which a reader takes none.
OUTPUT_S = 1.0


class Supervisor(Protocol):
    """A handler of the events of a job in which the launcher takes part."""

    tick_s: float

    def take(self, event: object) -> bool:
        """Handle an event if it is the supervisor's; return whether it was."""

    def tick(self) -> None:
        """Do what is due; called every ``tick_s`` seconds, and after every event."""

    def start_again(self, name: str, incarnation: int) -> None:
        """Start a worker that was killed again."""


class ProcessGroup:
    """The processes of a job, added one by one; at the end of the ``with`` block all have ended.

    Args:
        limits: The time limits of members.
        may_lose: The number of workers that may fail while the rest continue.
        restarts: The number of killed workers that are started again.
        leader: The worker without which the job ends; None: there is none.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        may_lose: int = 0,
        restarts: int = 0,
        leader: str | None = "rank 0",
    ) -> None:
        self._limits = limits
        self.supervisor: Supervisor | None = None
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._watch = Supervision(limits, time.monotonic, may_lose, restarts, leader)
        self._starts: dict[str, tuple[Sequence[str], Mapping[str, str], Placement]] = {}
        self._groups: dict[str, guardian.ChildGroup] = {}
        self._presence: dict[str, PresenceReader] = {}  # of workers
        self._servers: list[ServerProcess] = []
        self._helpers: set[str] = set()
        self._output: list[Relay] = []
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> ProcessGroup:
        self._cleanup.enter_context(_signals_into(self.events))
        self._guardian, self._guardian_socket = _start_guardian()
        return self

    def __exit__(self, *_: object) -> None:
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
        """Start a worker, with this process's stdin, stdout and stderr or with prefixed lines."""
        piped = subprocess.PIPE
        ours, theirs = os.pipe()
        presence = PresenceReader(ours)
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
            presence.close()
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
        """Add a server that was started."""
        self._servers.append(server)
        self._add(server.name, server.process)

    def add_helper(
        self, name: str, command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        """Start a process that is not a worker; its end is an event for the supervisor."""
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
        """Remove a directory if this process is killed."""
        with contextlib.suppress(OSError):
            guardian.announce_directory(self._guardian_socket, directory)

    def end(self, name: str, signum: signal.Signals = signal.SIGKILL) -> None:
        """Signal a process and its children."""
        self._kill_workers(signum, [name])

    def fail(self) -> None:
        """End the job; the supervisor has logged the reason. Only the main thread calls this."""
        self._watch.take(Ended(JOB, 1))

    def set_rules(self, *, leader: str | None, restarts: int, grace_s: float) -> None:
        """Change the reactions to ends of workers. A smaller ``grace_s`` that the caller of
        ``launch`` requested is kept."""
        limits = self._watch.limits
        self._watch.limits = replace(limits, grace_s=min(limits.grace_s, grace_s))
        self._watch.leader, self._watch.restarts = leader, restarts

    def shorten_grace(self, grace_s: float) -> None:
        """Give the other workers of an ending job at most this time."""
        self._watch.deadline = min(self._watch.deadline, time.monotonic() + grace_s)

    def stop_restarts(self) -> None:
        """Do not restart a worker that dies now, since all are about to end."""
        self._watch.over = True

    @property
    def ending(self) -> bool:
        """True if something has failed, or a signal has requested the end."""
        return self._watch.ending

    def servers_announced(self) -> bool:
        """Wait until every server has its address; return False if the job is over before that."""
        limit_s = self._limits.server_start_s
        deadline = time.monotonic() + limit_s
        while missing := [s.name for s in self._servers if not s.announced(timeout_s=0.05)]:
            self._handle_next(time.monotonic())
            if self._watch.ending:
                return False
            if time.monotonic() > deadline:
                raise WaitLimit("servers to write their addresses", limit_s, missing)
        return True

    def wait(self) -> Verdict:
        """Wait until all workers have ended, by themselves or because they were stopped."""
        while self._watch.running:
            until = self._watch.deadline
            if self.supervisor is not None:
                until = min(until, time.monotonic() + self.supervisor.tick_s)
            self._handle_next(until)
            if self.supervisor is not None:
                self.supervisor.tick()
            if time.monotonic() >= self._watch.deadline:
                if not self._watch.ending:
                    late = ", ".join(sorted(self._watch.to_signal))
                    log_line(f"{late} came back too late: training has finished")
                self._kill_workers(self._watch.escalate(), self._watch.to_signal)
        return self._watch.verdict()

    def _add(
        self, name: str, process: subprocess.Popen[bytes], presence: PresenceReader | None = None
    ) -> None:
        group = guardian.ChildGroup.led_by(process.pid)  # before the thread below can reap it
        if name in self._groups:
            self._groups[name].close()
        self._groups[name] = group
        if presence is not None:
            self._presence[name] = presence
        with contextlib.suppress(OSError):
            guardian.announce_group(self._guardian_socket, group)
        watched = (name, process, presence)
        threading.Thread(target=self._watch_exit, args=watched, daemon=True).start()

    def _watch_exit(
        self, name: str, process: subprocess.Popen[bytes], presence: PresenceReader | None
    ) -> None:
        code = process.wait()
        if presence is None:
            self.events.put(Ended(name, code))
            return
        place = presence.place()
        presence.close()
        self.events.put(Ended(name, code, place))

    def _handle_next(self, deadline: float) -> None:
        remaining_s = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
        lost, replaced = len(self._watch.lost), len(self._watch.replaced)
        with contextlib.suppress(queue.Empty):
            event = self.events.get(timeout=remaining_s)
            if self.supervisor is not None and self.supervisor.take(event):
                return
            assert isinstance(event, Ended | CameBack | Signalled)
            signum = self._watch.take(event)
            self._kill_workers(signum, self._watch.to_signal)
        for ended in self._watch.lost[lost:]:
            log_line(f"{ended}; the other workers continue")
        for ended in self._watch.replaced[replaced:]:
            log_line(f"{ended}; it is started again")
            self._start_again(ended.member)

    def _start_again(self, name: str) -> None:
        guardian.sweep([self._groups[name]])  # children of the old one
        incarnation = sum(ended.member == name for ended in self._watch.replaced)
        if self.supervisor is not None:
            self.supervisor.start_again(name, incarnation)
        else:
            self.add_returning(name, incarnation)

    def add_returning(self, name: str, incarnation: int, control: int | None = None) -> None:
        """Start a worker again with its old settings, and with a new socket to the launcher if it
        had one; an event follows when it has rejoined."""
        command, env, placement = self._starts[name]
        reader, writer = os.pipe()
        descriptors = {"SLIPSTREAM_BACK_FD": writer}
        if control is not None:
            descriptors["SLIPSTREAM_CONTROL_FD"] = control
        variables = {key: value for key, value in env.items() if key not in DESCRIPTORS}
        variables |= {key: str(descriptor) for key, descriptor in descriptors.items()}
        variables["SLIPSTREAM_INCARNATION"] = str(incarnation)
        passed = tuple(descriptors.values())
        try:
            self.add_worker(
                name, command, variables, placement, has_terminal=False, pass_fds=passed
            )
        finally:
            os.close(writer)
        threading.Thread(target=self._await_return, args=(name, reader), daemon=True).start()

    def _await_return(self, name: str, reader: int) -> None:
        """Wait for the byte that a worker writes when it has rejoined; it may end without."""
        with os.fdopen(reader, "rb") as pipe:
            if pipe.read(1):
                self.events.put(CameBack(name))

    def _kill_workers(self, signum: signal.Signals | None, members: Collection[str]) -> None:
        if signum is None:
            return
        for name in members:
            self._groups[name].send(self._bearable_signal(name, signum))

    def _bearable_signal(self, name: str, signum: signal.Signals) -> signal.Signals:
        """Return the signal that a worker can handle. Before ``slipstream.init`` it has nothing to
        save, and an interrupt would only print a traceback."""
        presence = self._presence.get(name)
        has_begun = presence is not None and presence.begun
        return signal.SIGTERM if signum is signal.SIGINT and not has_begun else signum

    def _close_servers(self) -> None:
        for server in self._servers:
            server.dismiss()
        deadline = time.monotonic() + SERVER_STOP_S
        for server in self._servers:
            server.close(max(0.0, deadline - time.monotonic()))

    def _finish_output(self) -> None:
        idle_s, deadline = OUTPUT_S, time.monotonic() + OUTPUT_S
        for relay in self._output:
            idle_s = relay.finish(idle_s, lambda: self._signalled() and time.monotonic() > deadline)

    def _signalled(self) -> bool:
        """Return whether a signal has requested the end; for when the job is over."""
        while not self.events.empty():
            event = self.events.get()
            if isinstance(event, Signalled):
                self._watch.take(event)
        return self._watch.signalled

    def _dismiss_guardian(self) -> None:
        with self._guardian_socket, contextlib.suppress(OSError):
            guardian.announce_end(self._guardian_socket)
        self._guardian.wait()


def log_line(line: str) -> None:
    """Print a line of the launcher itself, between the workers' lines."""
    with contextlib.suppress(OSError):  # the terminal may be closed
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
    """Turn SIGINT, SIGTERM and SIGHUP into events; under ``nohup`` SIGHUP stays ignored."""
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
