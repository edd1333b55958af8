"""Locks of directories, so that only one job at a time writes checkpoints into one.

The lock is the kernel's (``flock``), on a file in the directory, and belongs to the process that
took it: when that process ends, in whatever way, the lock ends too. The file stays; its content is
used only in error messages.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from slipstream.errors import LaunchError

NAME = ".lock"
LARGEST = 1024


class NotALock(LaunchError):
    """A lock's path that is no file, or has other hard links: writing might damage other data."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is a link or not a file; remove it, and start the job again")


class Owner(msgspec.Struct, frozen=True):
    """The launcher that holds a lock."""

    pid: int
    host: Annotated[str, msgspec.Meta(max_length=255, pattern=r"\A[\w.-]+\Z")]

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class DirectoryLocks:
    """The directories that this process has locked, until the block ends."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._held: dict[tuple[int, int], int] = {}

    def __enter__(self) -> DirectoryLocks:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._held.values():
            os.close(file)
        self._held.clear()

    def take(self, directory: Path) -> None:
        """Lock a directory, which is created if necessary; it may already be locked here."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = _open(directory / NAME)
        except OSError as error:
            raise LaunchError(
                f"cannot lock the directory {directory}: {error.strerror}; give one that this "
                "process may write to (checkpoints=…)"
            ) from error
        status = os.fstat(file)
        identity = (status.st_dev, status.st_ino)
        if identity in self._held:
            os.close(file)
            return
        try:
            self._lock(file, directory)
        except BaseException:
            os.close(file)
            raise
        self._held[identity] = file

    def _lock(self, file: int, directory: Path) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(
                f"another job keeps its checkpoints in {directory}: {_owner(file)}. Wait until it "
                "has ended, stop it, or give this job another directory (checkpoints=…)"
            ) from None
        except OSError as error:
            # Some network file systems do not support locks.
            self._warn(
                f"{directory} cannot be locked ({error.strerror}); two jobs that keep checkpoints "
                "there would delete each other's"
            )
            return
        with contextlib.suppress(OSError):  # a full disk, or another user's file
            if os.fstat(file).st_nlink > 1:
                return  # it has another hard link: do not change its content
            os.ftruncate(file, 0)
            os.pwrite(file, msgspec.json.encode(Owner(os.getpid(), socket.gethostname())), 0)


def _open(path: Path) -> int:
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
        except PermissionError:
            file = os.open(path, os.O_RDONLY | flags)  # another user's file can be locked, too
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise NotALock(path) from error
        raise
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise NotALock(path)
    return file


def _owner(file: int) -> str:
    try:
        return str(msgspec.json.decode(os.pread(file, LARGEST, 0), type=Owner))
    except (OSError, msgspec.DecodeError):
        return "a process that has not written its name there"
