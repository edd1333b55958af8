"""Files that grow by whole records."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RecordFile:
    """A file to which each record is appended completely or not at all: if the disk is full, a
    partial record is cut off, so that later records can be read once there is space."""

    def __init__(self, path: Path, *, append: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a buffer would keep what a full disk refused, and fail again when closed.
        self._file = path.open("ab" if append else "wb", buffering=0)
        self._nbytes = os.fstat(self._file.fileno()).st_size

    def write(self, record: bytes) -> None:
        """Append a whole record, or raise OSError."""
        written = 0
        try:
            while written < len(record):
                written += self._file.write(record[written:])
        except OSError:
            self._cut_off(written)
            raise
        self._nbytes += written

    def _cut_off(self, nbytes: int) -> None:
        descriptor = self._file.fileno()
        with contextlib.suppress(OSError):  # a pipe or a device cannot be truncated
            # If this is the program's own output, other processes may write to it too.
            if nbytes and os.fstat(descriptor).st_size == self._nbytes + nbytes:
                os.ftruncate(descriptor, self._nbytes)
                os.lseek(descriptor, self._nbytes, os.SEEK_SET)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_json(path: Path, content: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write JSON; if an OSError is raised, no partial content remains."""
    with contextlib.closing(RecordFile(path)) as file:
        file.write((json.dumps(content, indent=indent) + "\n").encode())
