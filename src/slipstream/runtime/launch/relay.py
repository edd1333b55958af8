"""A relay that copies a child's output line by line, prefixed with its name."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import IO

LOOK_S = 0.05  # how often `finish` checks whether to give up
READER_S = 600.0  # for a reader that takes nothing: see `finish`
LAST_NBYTES = 128 * 1024  # more than a pipe and the buffer hold


class Relay(threading.Thread):
    """A thread that copies ``stream`` to ``fd`` until it ends, ``prefix`` before every line.

    It closes the stream at the end. ``run`` copies on the thread that calls it.
    """

    def __init__(self, stream: IO[bytes], prefix: str, fd: int) -> None:
        super().__init__(name=f"relay {prefix.strip()}", daemon=True)
        self._stream, self._prefix, self._fd = stream, prefix.encode(), fd
        self._writing_since: float | None = None
        self._copied_nbytes, self._most_nbytes = 0, math.inf

    def run(self) -> None:
        """Copy until the stream ends, or what an ended child may have left is copied."""
        with self._stream:
            for line in self._stream:
                end = b"" if line.endswith(b"\n") else b"\n"
                self._writing_since = time.monotonic()
                _write(self._fd, self._prefix + line + end)
                self._writing_since = None
                self._copied_nbytes += len(line)
                if self._copied_nbytes > self._most_nbytes:
                    return

    def finish(self, idle_s: float, gives_up: Callable[[], bool]) -> float:
        """Wait for the last lines of a child that has ended; return what is left of ``idle_s``.

        A reader that takes lines slowly is waited for, and one that takes none for ``READER_S``.
        All other time counts as idle, since a stray process may hold the pipe open. It may also
        write for ever, so only as much is copied as the child can have left.
        """
        self._most_nbytes = self._copied_nbytes + LAST_NBYTES
        while self.is_alive() and not gives_up():
            start, writing_since = time.monotonic(), self._writing_since
            waited_s = 0.0 if writing_since is None else start - writing_since
            if waited_s > READER_S or (writing_since is None and idle_s <= 0):
                break
            self.join(LOOK_S)
            if writing_since is None:
                idle_s -= time.monotonic() - start
        return idle_s


def start_relay(stream: IO[bytes], prefix: str, fd: int) -> Relay:
    """Start a relay and return it."""
    relay = Relay(stream, prefix, fd)
    relay.start()
    return relay


def _write(fd: int, data: bytes) -> None:
    # One write per line, so that lines of several processes do not mix. A reader that has closed
    # (``| head``) must not stop the child: its pipe is still read.
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return
