"""Passing a child's output on, line by line, under its name."""

from __future__ import annotations

import os
import threading
from typing import IO


def relay(stream: IO[bytes], prefix: str, fd: int) -> None:
    """Copies ``stream`` to ``fd`` until it ends, ``prefix`` before every line, and closes it."""
    with stream:
        for line in stream:
            end = b"" if line.endswith(b"\n") else b"\n"
            _write(fd, prefix.encode() + line + end)


def start_relay(stream: IO[bytes], prefix: str, fd: int) -> threading.Thread:
    """``relay`` on a thread of its own."""
    thread = threading.Thread(
        target=relay, args=(stream, prefix, fd), name=f"relay {prefix.strip()}", daemon=True
    )
    thread.start()
    return thread


def _write(fd: int, data: bytes) -> None:
    # One write a line, so that lines of several processes do not run into each other. A reader
    # that has gone away (``| head``) must not stop the child: its pipe is emptied all the same.
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return
