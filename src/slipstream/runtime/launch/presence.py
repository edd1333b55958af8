"""The pipe over which a worker signals its launcher that it has begun, joined or left the job.

A worker may end with code 0 in the middle of a job (``os._exit(0)``); only these signals
distinguish it from a worker that has finished.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading

from slipstream.runtime.launch.supervision import Place

BEGUN, JOINED, LEFT = b"b", b"j", b"l"
MOST_SIGNS = 65536  # the capacity of a pipe


class Presence:
    """The worker's end; does nothing without a launcher."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor if is_pipe(descriptor) else None
        if self._descriptor is not None:
            os.set_inheritable(self._descriptor, False)

    def begin(self) -> None:
        """Signal that ``slipstream.init`` was called: the worker may now be interrupted."""
        self._write(BEGUN)

    def join(self) -> None:
        """Signal that the worker has joined."""
        self._write(JOINED)

    def leave(self) -> None:
        """Signal that the worker has left normally."""
        self._write(LEFT)

    def _write(self, sign: bytes) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the launcher is gone
                os.write(self._descriptor, sign)


def is_pipe(descriptor: int | None) -> bool:
    """Return whether a descriptor is a pipe. It is not in a worker's child, which only inherits the
    environment variable."""
    if descriptor is None:
        return False
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


class PresenceReader:
    """The launcher's end of the pipe.

    Args:
        reader: The pipe, which this object closes.
    """

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self._last = b""
        self._lock = threading.Lock()
        os.set_blocking(reader, False)

    def place(self) -> Place:
        """Return where the worker is, or was when it ended. This does not wait for the pipe to
        close, since the worker's children may hold the other end."""
        with self._lock:
            if self._reader >= 0:
                with contextlib.suppress(BlockingIOError):
                    self._last = os.read(self._reader, MOST_SIGNS)[-1:] or self._last
        if self._last in (b"", BEGUN):
            return "outside"
        return "left" if self._last == LEFT else "inside"  # a process may run several jobs

    @property
    def begun(self) -> bool:
        """True if the worker has called ``slipstream.init``."""
        self.place()
        return bool(self._last)

    def close(self) -> None:
        """Close the pipe; the place stays known."""
        with self._lock:
            if self._reader >= 0:
                os.close(self._reader)
            self._reader = -1
