"""Copies a child's output line by line, prefixed with its name."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import IO

LOOK_S = 0.05  # how often `finish` looks whether to give up


class Relay(threading.Thread):
    """Copies ``stream`` to ``fd`` until it ends, with ``prefix`` before every line, and closes it.

    It is a thread; ``run`` copies on the thread that calls it.
    """

    def __init__(self, stream: IO[bytes], prefix: str, fd: int) -> None:
        super().__init__(name=f"relay {prefix.strip()}", daemon=True)
        self._stream, self._prefix, self._fd = stream, prefix.encode(), fd
        self._writing = False
        self._last_s = time.monotonic()  # when the last line was written

    def run(self) -> None:
        """Copy until the stream ends."""
        with self._stream:
            for line in self._stream:
                end = b"" if line.endswith(b"\n") else b"\n"
                self._writing = True
                _write(self._fd, self._prefix + line + end)
                self._last_s, self._writing = time.monotonic(), False

    def finish(self, idle_s: float, gives_up: Callable[[], bool]) -> None:
        """Wait for the last lines of a child that has ended.

        A slow reader is waited for. The wait ends without the end of the stream if no line comes
        for ``idle_s`` (a stray process may hold the pipe open), or if ``gives_up()``.
        """
        begun_s = time.monotonic()
        while self.is_alive() and not gives_up():
            if not self._writing and time.monotonic() - max(begun_s, self._last_s) > idle_s:
                return
            self.join(LOOK_S)


def start_relay(stream: IO[bytes], prefix: str, fd: int) -> Relay:
    """A relay that runs."""
    relay = Relay(stream, prefix, fd)
    relay.start()
    return relay


def _write(fd: int, data: bytes) -> None:
    # One write per line, so that lines of several processes do not mix. A reader that has gone away
    # (``| head``) must not stop the child: its pipe is still read.
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return
