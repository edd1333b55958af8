"""Ranks share the launcher's output, so each of them writes whole lines."""

from __future__ import annotations

import io
import sys


def write_whole_lines() -> None:
    """Let this process write its stdout and stderr line by line, unless they are a terminal.

    A pipe or a file gets blocks of lines by default, and parts of lines with ``PYTHONUNBUFFERED``
    (which many images set). The launcher writes the lines of other ranks in between.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.closed and not stream.isatty():
            stream.reconfigure(line_buffering=True, write_through=False)
