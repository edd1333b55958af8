"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from slipstream.errors import CheckpointError


def write_whole(path: Path, parts: Iterable[bytes | bytearray | memoryview]) -> None:
    """Beside the target first, then in its place: a reader sees the old file or the new."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
