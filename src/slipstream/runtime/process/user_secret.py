"""A user's own secret, for jobs that need one and were given none.

It is created when it is first needed, and readable by its owner only. All ranks of one user on one
host, or on hosts with a shared home, find the same one.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from slipstream.errors import SecretError

MOST_BYTES = 64 * 1024


def user_secret_path(env: Mapping[str, str]) -> Path | None:
    """Return the path of a user's secret; None if no home directory is known."""
    config, home = env.get("XDG_CONFIG_HOME", ""), env.get("HOME", "")
    if os.path.isabs(config):  # others are invalid by its specification
        return Path(config) / "slipstream" / "secret"
    return Path(home) / ".config" / "slipstream" / "secret" if os.path.isabs(home) else None


def user_secret(path: Path) -> str:
    """Return the secret in this file, which is created if there is none.

    Raises:
        SecretError: It cannot be created or read, or others may have read or written it.
    """
    try:
        if not os.path.lexists(path):
            make(path)
        return read(path)
    except UnicodeDecodeError as error:
        raise SecretError(f"{path} is not text: remove it, and a new one is made") from error
    except OSError as error:
        raise SecretError(f"{path} cannot be used: {error.strerror or error}") from error


def make(path: Path) -> None:
    """Write a new secret completely or not at all, unless another process was faster."""
    existing = next(folder for folder in path.parents if folder.exists())
    way_out = (
        f"it would be made in {path.parent}; set HOME to a folder of this user (sudo keeps it)"
    )
    require_own(existing, os.stat(existing), way_out)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{secrets.token_hex(8)}.draft")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(draft, path)  # unlike a rename, it does not replace another one
    finally:
        draft.unlink()


def read(path: Path) -> str:
    """Return the content of a secret's file, if it is this user's alone."""
    folder = os.stat(path.parent)
    require_own(path.parent, folder, "move it away, and a new one is made")
    if folder.st_mode & 0o022:
        raise SecretError(f"others may write to {path.parent}: run `chmod 700 {path.parent}`")
    if path.is_symlink():
        raise SecretError(
            f"{path} is a symbolic link: put a file there, or give the other file's path in "
            "SLIPSTREAM_SECRET_FILE"
        )
    # Non-blocking: opening a pipe without a writer would wait for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SecretError(f"{path} is no file: remove it, and a new one is made")
        require_own(path, status, "remove it, and a new one is made")
        if status.st_mode & 0o077:
            raise SecretError(
                f"others may read or write {path} (mode {stat.S_IMODE(status.st_mode):o}): remove "
                f"it, and a new one is made, or run `chmod 600 {path}` if nobody has read it"
            )
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise SecretError(f"{path} has more than {MOST_BYTES} bytes: remove it")
    return content.decode().strip()


def require_own(path: Path, status: os.stat_result, way_out: str) -> None:
    """Check that a path belongs to this user; raise SecretError if it does not."""
    if status.st_uid != os.geteuid():
        raise SecretError(
            f"{path} belongs to user {status.st_uid}, and this process runs as {os.geteuid()}: "
            f"{way_out}"
        )
