"""A worker signals its launcher through a pipe that it has joined or left the job.

A worker may end with code 0 in the middle of a job (``os._exit(0)``); only these signals
distinguish it from a worker that has finished.
"""

from __future__ import annotations

import contextlib
import os
import stat

from slipstream.runtime.launch.supervision import Place

JOINED, LEFT = b"j", b"l"
MOST_SIGNS = 65536  # what a pipe holds


class Presence:
    """The worker's end; does nothing without a launcher."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor if is_pipe(descriptor) else None
        if self._descriptor is not None:
            os.set_inheritable(self._descriptor, False)

    def join(self) -> None:
        """The worker has joined."""
        self._write(JOINED)

    def leave(self) -> None:
        """The worker has left normally."""
        self._write(LEFT)

    def _write(self, sign: bytes) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the launcher is gone
                os.write(self._descriptor, sign)


def is_pipe(descriptor: int | None) -> bool:
    """False in a child of a worker: it inherits the variables, but not the descriptors."""
    if descriptor is None:
        return False
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def place_of(reader: int) -> Place:
    """Where a worker was when it ended. Its children may hold the other end, so do not wait."""
    os.set_blocking(reader, False)
    try:
        signs = os.read(reader, MOST_SIGNS)
    except BlockingIOError:
        signs = b""
    if not signs:
        return "outside"
    return "left" if signs.endswith(LEFT) else "inside"  # a process may run several jobs
