"""Workers that rank 0's own process has started, as launchers of frameworks do.

``slipstream run`` has a launcher of its own; here rank 0 is a worker and the launcher. Its training
thread is informed by the job when another worker has failed. Only before it has joined, or if it
waits for something else, this class ends it. In the same way a worker that waits for rank 0 ends
with it.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from slipstream.errors import EXIT_PEER_FAILED, LaunchError
from slipstream.runtime.launch.death_signal import death_signal

FAILED_S = 8.0  # for workers to end after rank 0's script has failed
EXIT_S = 600.0  # for workers to end after rank 0's script, which may do less than theirs
SAME_CALLS = "every rank has to make the same calls of the Trainer"


class Children:
    """The workers of this node: in rank 0's process the other ones, in theirs none.

    Attributes:
        grace_s: Time for workers to end by themselves after one has failed. The job informs them,
            so it is 0 before they have joined.
    """

    def __init__(self) -> None:
        self.grace_s = 0.0
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._needed, self._is_over, self._parent_ended = (threading.Event() for _ in range(3))
        self._first = threading.Lock()
        self._end_writer = -1
        self._pid = self._rank = -1  # of the process that has started them
        self._threads: list[threading.Thread] = []

    # ---- in rank 0's process

    def parent(self) -> str:
        """Return the argument of a worker's ``follow``; call it before the workers are started."""
        reader, self._end_writer = os.pipe()
        return f"{os.getpid()}/fd/{reader}"

    def watch(self, processes: Sequence[subprocess.Popen[bytes]], first: int = 1) -> None:
        """Watch the processes of rank ``first`` and so on; wait for them at exit."""
        self._pid, self._rank = os.getpid(), first - 1
        for rank, process in enumerate(processes, first):
            self._processes[f"rank {rank}"] = process
            thread = threading.Thread(target=self._await, args=(f"rank {rank}",), daemon=True)
            thread.start()
            self._threads.append(thread)
        atexit.register(self._at_exit)

    def _await(self, name: str) -> None:
        code = self._processes[name].wait()
        if code == 0 or not self._needed.is_set() or self._is_over.wait(self.grace_s):
            return
        if self._first.acquire(blocking=False):  # the others end because of this one
            print(f"slipstream: {name} exited with code {code}", file=sys.stderr, flush=True)
            self.end(0.0)
            os._exit(1)

    def send(self, signum: int) -> None:
        """Send a signal to all that still run."""
        for process in self._processes.values():
            process.send_signal(signum)

    def end(self, grace_s: float | None = None) -> None:
        """End all that do not end by themselves, since rank 0 has failed."""
        deadline = time.monotonic() + (self.grace_s if grace_s is None else grace_s)
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:  # a fork of this process
            return
        failed = getattr(sys, "last_value", None) is not None
        running = {name: each for name, each in self._processes.items() if each.poll() is None}
        if self._end_writer >= 0:
            os.write(self._end_writer, bytes(len(self._processes)))
        self.end(FAILED_S if failed else EXIT_S)
        waited = [name for name, each in running.items() if each.returncode == EXIT_PEER_FAILED]
        if waited and not failed:  # the error of a script is printed by Python
            print(
                f"slipstream: the script of rank {self._rank} has ended, and {', '.join(waited)} "
                f"had more to train: {SAME_CALLS}",
                file=sys.stderr,
                flush=True,
            )

    # ---- in a worker's process

    def follow(self, parent: str) -> None:
        """End with the process that returned ``parent``; on Linux only."""
        if (arm := death_signal(int(parent.partition("/")[0]))) is None:
            return
        arm()
        with suppress(OSError):  # /proc may be hidden
            pipe = os.open(f"/proc/{parent}", os.O_RDONLY)
            threading.Thread(target=self._await_parent, args=(pipe,), daemon=True).start()

    def _await_parent(self, pipe: int) -> None:
        os.read(pipe, 1)
        self._parent_ended.set()
        # Only a job could report the reason. In this order, since ``leave`` sets the grace to 0
        # last.
        if not self.grace_s and self._needed.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_PEER_FAILED)

    # ---- in both

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Let this process end with those that it depends on, until ``leave``.

        Raises:
            LaunchError: Another process has ended already.
        """
        self._is_over.clear()
        self._needed.set()
        try:
            if self._parent_ended.is_set():
                raise SystemExit(EXIT_PEER_FAILED)  # rank 0 prints the reason
            for name, process in self._processes.items():
                if (code := process.poll()) is not None:
                    raise LaunchError(
                        f"{name} has ended (exit code {code}), so there are not enough workers any "
                        f"more: {SAME_CALLS}"
                    )
            yield
        finally:
            self._stop_depending()

    def leave(self) -> None:
        """Stop depending on the others, as this process has left the job."""
        self._stop_depending()
        self.grace_s = 0.0

    def _stop_depending(self) -> None:
        self._needed.clear()
        self._is_over.set()
