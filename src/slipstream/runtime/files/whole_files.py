"""Files that other users of a machine cannot redirect or block.

A file is written as a draft in the same directory and then renamed, so a reader sees the old file
or the new one. In a directory that others may write to, an attacker could plant a symlink under a
predictable draft name. Drafts therefore have random names and are created exclusively.

A writer holds a lock on its draft. A draft without a lock was left by a writer that died,
and is removed by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from slipstream.errors import CheckpointError

Parts = Iterable[bytes | bytearray | memoryview]
# Locks of another host may not be visible here, so each host removes its own drafts only.
HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
DRAFT = re.compile(rf"\.slipstream-{HOST}-[0-9a-f]{{16}}\.draft")
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
LOOK = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
PLAIN_MODE = 0o666  # less the umask, as open() has it
TRIES = 100

KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegular(OSError):
    """An error: a path that is not a regular file."""

    def __init__(self, mode: int) -> None:
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        super().__init__(errno.EINVAL, f"it is {kind}, not a regular file")


# ---- writing


def write_whole(path: Path, parts: Parts) -> None:
    """Write a checkpoint: the new file is complete, or the old one stays."""
    try:
        replace_file(path, parts)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def replace_file(path: Path, parts: Parts) -> None:
    """Replace ``path`` by a new file, complete and on disk, or raise OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        refuse_irregular(os.stat(path).st_mode)  # a rename would replace a device by a file
    sweep_drafts(path.parent)
    draft, file = create_draft(path.parent)
    try:
        with file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync_directory(path.parent)


def create_draft(directory: Path) -> tuple[Path, BinaryIO]:
    """Create a file with an unpredictable name, locked by this process."""
    for _ in range(TRIES):
        draft = directory / f".slipstream-{HOST}-{secrets.token_hex(8)}.draft"
        with contextlib.suppress(FileExistsError):
            file = os.fdopen(os.open(draft, CREATE, PLAIN_MODE), "wb")
            if lock(file) and os.path.lexists(draft):
                return draft, file
            # A process that removes old drafts took the lock first.
            file.close()
            draft.unlink(missing_ok=True)
    raise OSError(errno.EBUSY, "another process takes every draft for an abandoned one")


def lock(file: BinaryIO) -> bool:
    """Lock a file; return False if another process holds the lock, True without lock support."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def sweep_drafts(directory: Path) -> None:
    """Remove drafts whose writers have died."""
    with contextlib.suppress(OSError):
        for name in filter(DRAFT.fullmatch, os.listdir(directory)):
            with contextlib.suppress(OSError):
                remove_if_dead(directory / name)


def remove_if_dead(draft: Path) -> None:
    """Remove a draft of this user whose writer has died; raise OSError otherwise."""
    if not is_own_file(os.lstat(draft)):
        return
    handle = os.open(draft, LOOK)
    try:
        if is_own_file(os.fstat(handle)):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
            draft.unlink()
    finally:
        os.close(handle)


def is_own_file(status: os.stat_result) -> bool:
    """Return whether it is a regular file of this user."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def sync_directory(directory: Path) -> None:
    """Sync the directory if that is possible; the file is in place either way."""
    try:
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


# ---- reading


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading. A symlink is followed; a file that is not regular is refused."""
    refuse_irregular(os.stat(path).st_mode)  # opening a device may already have an effect
    with os.fdopen(os.open(path, READ), "rb") as file:
        refuse_irregular(os.fstat(file.fileno()).st_mode)
        yield file


def read_own(path: Path, limit_nbytes: int) -> bytes:
    """Return the content of a small file of this user or of root; raise OSError if it is another
    user's, too large or irregular."""
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(errno.EACCES, "it belongs to another user")
        if status.st_size > limit_nbytes:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, more than {limit_nbytes}")
        return file.read(limit_nbytes)


def refuse_irregular(mode: int) -> None:
    """Check that a file is regular; raise NotRegular otherwise."""
    if not stat.S_ISREG(mode):
        raise NotRegular(mode)
