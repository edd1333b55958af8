"""Starting processes that do not outlive the one that started them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from slipstream.errors import LaunchError, WaitLimit
from slipstream.runtime.launch.death_signal import death_signal
from slipstream.runtime.launch.guardian import ChildGroup
from slipstream.runtime.launch.relay import Relay, start_relay
from slipstream.transports.credentials import Credentials
from slipstream.transports.descriptors import ERRORS, out_of_descriptors

# -P: the server must not import modules from the user's working directory.
SERVER_COMMAND = (sys.executable, "-P", "-m", "slipstream.runtime.servers.server")
# The modules of the user's own parts that a server may import, and the folders they are in.
PARTS, PARTS_PATH = "SLIPSTREAM_PARTS", "SLIPSTREAM_PARTS_PATH"
SERVER_START_S = 60.0
SERVER_STOP_S = 3.0

# Variables of one worker; a process that it starts, or a job within it, must not inherit them.
WORKER_VARIABLES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLIPSTREAM_STORE_FD",
        "SLIPSTREAM_CONTROL_FD",
        "SLIPSTREAM_BACK_FD",
        "SLIPSTREAM_PRESENCE_FD",
        "SLIPSTREAM_JOB",
        "SLIPSTREAM_LAUNCHER",
        "SLIPSTREAM_SERVER_ADDRESSES",
        "SLIPSTREAM_SERVER_INDEX",
        "SLIPSTREAM_RUN_KEY",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_USE_AGENT_STORE",
    }
)
SECRET_VARIABLES = frozenset({"SLIPSTREAM_SECRET", "SLIPSTREAM_SECRET_FILE"})


@dataclass(frozen=True, slots=True)
class Placement:
    """A place to run a process: a command prefix, and environment on top of the job's.

    ``Placement(("ip", "netns", "exec", "host0"))`` runs it in a network namespace. The prefix
    has to become the process (exec), not stay its parent. ``address`` is its address for others, if
    it is not on the launcher's own host.
    """

    prefix: tuple[str, ...] = ()
    address: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


def inherited_environment() -> dict[str, str]:
    """Return this process's environment without the variables that are only for itself."""
    return {name: value for name, value in os.environ.items() if name not in WORKER_VARIABLES}


def start_process(
    command: Sequence[str],
    env: Mapping[str, str],
    placement: Placement,
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
    arms_itself: bool = False,
) -> subprocess.Popen[bytes]:
    """Start ``command`` in its own session; on Linux it is killed when its parent dies.

    The kernel treats the calling *thread* as the parent: call this from a thread that stays.

    Args:
        arms_itself: The command sets its own death signal when it has begun. No code of this
            process then runs in a fork of it, of which frameworks with threads (JAX) warn.
    """
    full = [*placement.prefix, *command]
    try:
        return subprocess.Popen(
            full,
            env={**env, **placement.env},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=None if arms_itself else death_signal(os.getpid()),
        )
    except OSError as error:
        if error.errno in ERRORS:
            raise out_of_descriptors(f"starting {full[0]!r}") from error
        reason = error.strerror or str(error)
        raise LaunchError(f"cannot start {full[0]!r}: {reason}; is it on the PATH?") from error


class ServerProcess:
    """A server this process started. It lives until ``close()``, or as long as its parent."""

    def __init__(self, index: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.index = index
        self.process = process
        self._group = ChildGroup.led_by(process.pid)
        self.address = ""
        self._stdin = process.stdin
        self._first_line: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        self.output = (reader, start_relay(process.stderr, f"[{self.name}] ", 2))

    @property
    def name(self) -> str:
        """The server's name, such as ``server 0``."""
        return f"server {self.index}"

    def _read(self, stdout: IO[bytes]) -> None:
        self._first_line.put(stdout.readline())
        Relay(stdout, f"[{self.name}] ", 2).run()

    def announced(self, timeout_s: float) -> bool:
        """Wait for the address; return True once it is known."""
        if self.address:
            return True
        try:
            line = self._first_line.get(timeout=timeout_s)
        except queue.Empty:
            return False
        try:
            self.address = str(json.loads(line)["address"])
        except (ValueError, KeyError, TypeError) as error:
            wrote = repr(line.decode(errors="replace").strip()) if line else "nothing"
            raise LaunchError(
                f"{self.name} did not start: it wrote {wrote} where its address was expected; "
                "its output above may show why"
            ) from error
        return True

    def dismiss(self) -> None:
        """Ask the server to end, without waiting."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def close(self, timeout_s: float = SERVER_STOP_S) -> None:
        """Ask the server to end, wait, and kill it if it does not."""
        self.dismiss()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._group.send(signal.SIGKILL)
            self.process.wait()
        self._group.close()
        for thread in self.output:
            thread.join(timeout=1.0)


def start_server(
    *,
    index: int,
    credentials: Credentials,
    bind: str = "127.0.0.1",
    placement: Placement | None = None,
    timeout_s: float | None = SERVER_START_S,
    command: Sequence[str] = SERVER_COMMAND,
    parts: Sequence[str] = (),
) -> ServerProcess:
    """Start a server.

    It has its own session, so the terminal's Ctrl-C does not reach it, and ends with the thread
    that called this (Linux) or when its stdin closes (everywhere).

    Args:
        index: The server's number.
        credentials: The credentials of this run.
        bind: The address to listen on.
        placement: The place to run it.
        timeout_s: The longest wait for the server's address; None: do not wait.
        command: The server's command line.
        parts: The modules of the user's own parts, found where this process finds modules.

    Raises:
        LaunchError: It cannot be started, or has ended.
        WaitLimit: Its address has not arrived in time.
    """
    # Only the key of this run; not the job's secret, from which the keys of all runs are derived.
    env = {k: v for k, v in inherited_environment().items() if k not in SECRET_VARIABLES} | {
        "SLIPSTREAM_SERVER_INDEX": str(index),
        "SLIPSTREAM_RUN_KEY": credentials.key.hex(),
        "SLIPSTREAM_ENCRYPT": "1" if credentials.encrypt else "0",
        "SLIPSTREAM_BIND": bind,
    }
    if parts:
        places = [os.path.abspath(place) for place in sys.path]  # "" is the current folder
        env |= {PARTS: ",".join(parts), PARTS_PATH: os.pathsep.join(places)}
    arms_itself = command is SERVER_COMMAND
    if arms_itself:
        env["SLIPSTREAM_STARTED_BY"] = str(os.getpid())
    pipe = subprocess.PIPE
    process = start_process(
        command,
        env,
        placement or Placement(),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        arms_itself=arms_itself,
    )
    server = ServerProcess(index, process)
    try:
        if timeout_s is not None and not server.announced(timeout_s):
            raise WaitLimit(f"{server.name} to write its address", timeout_s, [server.name])
    except BaseException:
        server.close(timeout_s=0.5)
        raise
    return server
