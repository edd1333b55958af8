"""One job at a time in a directory."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.errors import LaunchError
from slipstream.runtime.files.directory_lock import NAME, DirectoryLocks

HOLDER = """
import sys
from pathlib import Path
from slipstream.runtime.files.directory_lock import DirectoryLocks
locks = DirectoryLocks(print)
locks.take(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def locks() -> Iterator[DirectoryLocks]:
    with DirectoryLocks(pytest.fail) as locks:
        yield locks


@contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has locked a directory."""
    command = [sys.executable, "-c", HOLDER, str(directory)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_who_comes_second_is_told_who_was_first(tmp_path: Path, locks: DirectoryLocks) -> None:
    with holder(tmp_path) as first:
        who = f"process {first.pid} on {socket.gethostname()}"
        message = f"another job keeps its checkpoints in {tmp_path}: {who}. Wait until it has ended"
        with pytest.raises(LaunchError, match=re.escape(message)):
            locks.take(tmp_path)
        first.send_signal(signal.SIGKILL)
        first.wait()
        locks.take(tmp_path)  # the kernel has released it
    with (
        pytest.raises(LaunchError, match=f"process {os.getpid()} on "),
        DirectoryLocks(pytest.fail) as others,
    ):
        others.take(tmp_path)


def test_a_job_is_not_refused_by_its_own_lock(tmp_path: Path, locks: DirectoryLocks) -> None:
    kept = tmp_path / "new" / "kept"
    locks.take(kept)
    locks.take(kept)
    (tmp_path / "link").symlink_to(kept)
    locks.take(tmp_path / "link")
    with pytest.raises(LaunchError), DirectoryLocks(pytest.fail) as others:
        others.take(kept)


def test_the_lock_ends_with_the_block(tmp_path: Path) -> None:
    for _ in range(2):
        with DirectoryLocks(pytest.fail) as locks:
            locks.take(tmp_path)


@pytest.mark.parametrize("kind", ["symbolic link", "fifo", "directory"])
def test_what_is_no_lock_is_left_alone(tmp_path: Path, locks: DirectoryLocks, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    kept = tmp_path / "kept"
    kept.mkdir()
    if kind == "symbolic link":
        (kept / NAME).symlink_to(precious)
    elif kind == "fifo":
        os.mkfifo(kept / NAME)
    else:
        (kept / NAME).mkdir()
    with pytest.raises(LaunchError, match="is a link or not a file; remove it"):
        locks.take(kept)
    assert precious.read_text() == "content"


def test_a_lock_that_is_another_file_too_is_not_written_to(
    tmp_path: Path, locks: DirectoryLocks
) -> None:
    """As in a directory that was copied with hard links."""
    precious = tmp_path / "precious"
    precious.write_text("content")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / NAME).hardlink_to(precious)
    locks.take(tmp_path / "kept")
    assert precious.read_text() == "content"


def test_what_a_lock_says_is_not_trusted(tmp_path: Path, locks: DirectoryLocks) -> None:
    with holder(tmp_path):
        (tmp_path / NAME).write_text('{"pid": 1, "host": "\\u001b[2J"}')
        with pytest.raises(LaunchError, match="a process that has not written its name there"):
            locks.take(tmp_path)


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path, locks: DirectoryLocks) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot lock the directory .*: Not a directory"):
        locks.take(tmp_path / "file" / "kept")
