"""Copies a child's output line by line, prefixed with its name."""

from __future__ import annotations

import os
import threading
from typing import IO


def relay(stream: IO[bytes], prefix: str, fd: int) -> None:
    """Copy ``stream`` to ``fd`` until it ends, with ``prefix`` before every line, and close it."""
    with stream:
        for line in stream:
            end = b"" if line.endswith(b"\n") else b"\n"
            _write(fd, prefix.encode() + line + end)


def start_relay(stream: IO[bytes], prefix: str, fd: int) -> threading.Thread:
    """``relay`` on a separate thread."""
    thread = threading.Thread(
        target=relay, args=(stream, prefix, fd), name=f"relay {prefix.strip()}", daemon=True
    )
    thread.start()
    return thread


def _write(fd: int, data: bytes) -> None:
    # One write per line, so that lines of several processes do not mix. A reader that has gone away
    # (``| head``) must not stop the child: its pipe is still read.
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return
