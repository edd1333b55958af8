"""Files that a user names: read up to a limit, without waiting for a pipe that has no writer.

If a file cannot be read, the ``OSError`` has a ``strerror`` for an error message.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from slipstream.units import human_bytes


def read_limited(path: Path, most_nbytes: int) -> bytes:
    """All of a file or pipe."""
    with opened(path, most_nbytes) as file:
        return read_rest(file, most_nbytes)


def lines_limited(path: Path, most_nbytes: int, most_line_nbytes: int) -> Iterator[bytes]:
    """Line by line, for files that are not kept in memory as a whole."""
    with opened(path, most_nbytes) as file:
        seen = 0
        while line := file.readline(most_line_nbytes + 1):
            seen += len(line)
            if seen > most_nbytes:
                raise too_large("it", most_nbytes)
            if len(line) > most_line_nbytes:
                raise too_large("one of its lines", most_line_nbytes)
            yield line


@contextmanager
def opened(path: Path, most_nbytes: int) -> Iterator[BinaryIO]:
    """A file of at most this size, or a pipe; devices are endless and are refused."""
    try:
        # Non-blocking: opening a pipe without a writer would wait for ever. Such a pipe is empty.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # a zero byte in its name
        raise OSError(errno.EINVAL, "no file can have this name") from error
    try:
        kind = os.fstat(descriptor)
        if stat.S_ISDIR(kind.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not (stat.S_ISREG(kind.st_mode) or stat.S_ISFIFO(kind.st_mode)):
            raise OSError(errno.EINVAL, "it is a device, not a file")
        if kind.st_size > most_nbytes:
            raise too_large("it", most_nbytes)
        os.set_blocking(descriptor, True)
    except OSError:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_rest(file: BinaryIO, most_nbytes: int) -> bytes:
    """The rest of a file; its size may have grown, or be unknown until it is decompressed."""
    content = file.read(most_nbytes + 1)
    if len(content) > most_nbytes:
        raise too_large("it", most_nbytes)
    return content


def too_large(what: str, most_nbytes: int) -> OSError:
    return OSError(errno.EFBIG, f"{what} has more than {human_bytes(most_nbytes)}, the limit")
