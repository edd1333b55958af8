"""Workers that rank 0's own process has started, as launchers of frameworks do it.

``slipstream run`` has a launcher of its own; here rank 0 is a worker and the launcher. Its training
thread learns from the job that another worker has failed. Only before it has joined, or if it waits
for something else, this ends it.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from slipstream.errors import LaunchError

GRACE_S = 8.0  # for workers to end by themselves after one has failed
EXIT_S = 600.0  # for workers to end after rank 0


class Children:
    """The other workers of this node.

    Attributes:
        joined: whether rank 0 is in a job with them; they are then told if it fails.
    """

    def __init__(self) -> None:
        self.joined = False
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._training = threading.Event()
        self._over = threading.Event()
        self._first = threading.Lock()

    def watch(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """These are rank 1 and so on; rank 0 waits for them when it exits."""
        for rank, process in enumerate(processes, 1):
            self._processes[f"rank {rank}"] = process
            threading.Thread(target=self._await, args=(f"rank {rank}",), daemon=True).start()
        atexit.register(self._at_exit)

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Within, rank 0 depends on them, and ends if one of them has failed.

        Raises:
            LaunchError: one of them has ended already.
        """
        self._over.clear()
        self._training.set()
        try:
            for name, process in self._processes.items():
                if (code := process.poll()) is not None:
                    raise LaunchError(
                        f"{name} has ended (exit code {code}), so there are not enough workers any "
                        "more: every rank has to make the same calls of the Trainer"
                    )
            yield
        finally:
            self._training.clear()
            self._over.set()

    def _await(self, name: str) -> None:
        code = self._processes[name].wait()
        if code == 0 or not self._training.is_set():
            return
        if self._over.wait(GRACE_S if self.joined else 0.0):
            return
        if self._first.acquire(blocking=False):  # the others end because of it
            print(f"slipstream: {name} exited with code {code}", file=sys.stderr, flush=True)
            self.end(0.0)
            os._exit(1)

    def send(self, signum: int) -> None:
        """Send a signal to all that still run."""
        for process in self._processes.values():
            process.send_signal(signum)

    def end(self, grace_s: float | None = None) -> None:
        """Rank 0 has failed: end all that do not end by themselves."""
        deadline = time.monotonic() + (
            grace_s if grace_s is not None else GRACE_S if self.joined else 0.0
        )
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _at_exit(self) -> None:
        # A worker may still have something to do, unless the script has failed.
        self.end(GRACE_S if getattr(sys, "last_value", None) is not None else EXIT_S)
