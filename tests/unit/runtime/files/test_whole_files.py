"""Drafts that nobody can foresee, and files that cannot be made to hang a reader."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import CheckpointError
from slipstream.runtime.files.whole_files import (
    HOST,
    NotRegular,
    open_regular,
    read_own,
    replace_file,
    sweep_drafts,
    write_whole,
)
from slipstream.runtime.shared_memory.checkpoints import Snapshot
from slipstream.torch.channels.speed_cache import OwnSpeeds, cached, read
from slipstream.torch.checkpoints.checkpoint import Checkpoint

FACTS = {"step": 3, "strategy": "alone", "workers": 1, "random": [], "optimizer": {}}
DRAFT = f".slipstream-{HOST}-0123456789abcdef.draft"
OTHER_USER = 12345


def by_torch(path: Path) -> None:
    Checkpoint({"a": torch.ones(2)}, {"format": 1, **FACTS}).write(path)


def by_server(path: Path) -> None:
    Snapshot({}, dict(FACTS)).write(path)


def by_cache(path: Path) -> None:
    cached(path, "machine", lambda: OwnSpeeds(1.0, 1.0))


WRITERS = {"torch": by_torch, "server": by_server, "cache": by_cache}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_a_symlink_with_a_predictable_name_is_not_followed(
    writer: Callable[[Path], None], tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for pid in (os.getpid(), os.getppid(), 1):
        (tmp_path / f".file.{pid}.draft").symlink_to(victim)
    writer(tmp_path / "file")
    assert victim.read_text() == "precious"
    assert (tmp_path / "file").is_file()
    assert not (tmp_path / "file").is_symlink()


def test_a_name_that_was_guessed_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / DRAFT).symlink_to(victim)
    names = iter(["0123456789abcdef", "fedcba9876543210"])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(names))
    replace_file(tmp_path / "file", [b"new"])
    assert victim.read_text() == "precious"
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / DRAFT).is_symlink()


def test_names_are_drawn_anew_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append(Path(source).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    for _ in range(3):
        replace_file(tmp_path / "file", [b"new"])
    assert len(set(seen)) == 3
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o000])
def test_permissions_are_those_of_a_plain_file(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        (tmp_path / "plain").write_bytes(b"")
        replace_file(tmp_path / "file", [b"new"])
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "file")]
    assert modes == [0o666 & ~umask] * 2


class Writer:
    """A process in the middle of writing ``path``."""

    def __init__(self, path: Path) -> None:
        self._begun, begun = os.pipe()
        go_on, self._go_on = os.pipe()

        def parts() -> Iterator[bytes]:
            yield b"half "
            os.write(begun, b".")
            os.read(go_on, 1)
            yield b"whole"

        self.pid = os.fork()
        if self.pid == 0:
            replace_file(path, parts())
            os._exit(0)
        os.close(begun)
        os.close(go_on)
        assert os.read(self._begun, 1) == b"."

    def go_on(self) -> None:
        os.write(self._go_on, b".")

    def end(self) -> int:
        os.close(self._begun)
        os.close(self._go_on)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def drafts(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.endswith(".draft")]


def test_the_draft_of_a_live_writer_stays(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "file")
    sweep_drafts(tmp_path)
    replace_file(tmp_path / "other", [b"meanwhile"])
    assert len(drafts(tmp_path)) == 1
    writer.go_on()
    assert writer.end() == 0
    assert (tmp_path / "file").read_bytes() == b"half whole"
    assert drafts(tmp_path) == []


def test_the_draft_of_a_dead_writer_goes_with_the_next_file(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "file")
    os.kill(writer.pid, signal.SIGKILL)
    assert writer.end() == -signal.SIGKILL
    assert len(drafts(tmp_path)) == 1
    write_whole(tmp_path / "file", [b"new"])
    assert os.listdir(tmp_path) == ["file"]


def test_a_draft_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its creation and its lock it looks like one that was left behind."""
    swept: list[int] = []
    fdopen = os.fdopen

    def swept_first(handle: int, mode: str) -> object:
        if not swept:
            swept.append(handle)
            sweep_drafts(tmp_path)
        return fdopen(handle, mode)

    monkeypatch.setattr(os, "fdopen", swept_first)
    replace_file(tmp_path / "file", [b"new"])
    assert swept
    assert (tmp_path / "file").read_bytes() == b"new"


def test_only_own_files_are_swept(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    names = [f".slipstream-{HOST}-{n:016x}.draft" for n in range(5)]
    (tmp_path / names[0]).symlink_to(victim)
    os.mkfifo(tmp_path / names[1])
    (tmp_path / names[2]).mkdir()
    (tmp_path / names[3]).write_text("")
    (tmp_path / ".slipstream-notes.draft").write_text("of the user")
    elsewhere = ".slipstream-01234567-0123456789abcdef.draft"
    (tmp_path / elsewhere).write_text("of another host, whose locks may not be seen here")
    left = {"victim", *names[:3], ".slipstream-notes.draft", elsewhere}
    if os.geteuid() == 0:
        (tmp_path / names[4]).write_text("")
        os.chown(tmp_path / names[4], OTHER_USER, OTHER_USER)
        left.add(names[4])
    sweep_drafts(tmp_path)
    assert set(os.listdir(tmp_path)) == left
    assert victim.read_text() == "precious"


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


IRREGULAR = {"a pipe": pipe, "a socket": listener, "a device": device, "a directory": os.mkdir}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_only_regular_files_are_replaced_or_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    path = Path("thing")
    IRREGULAR[kind](path)
    before = os.lstat(path)
    with pytest.raises(CheckpointError, match=f"cannot write thing: it is {kind}, not a regular"):
        write_whole(path, [b"new"])
    with pytest.raises(NotRegular, match=f"it is {kind}"), open_regular(path):
        pass
    assert os.lstat(path) == before
    for reads in (Checkpoint.read, Snapshot.read):
        with pytest.raises(CheckpointError, match=f"cannot read thing: it is {kind}"):
            reads(path)
    assert read(path) == {}


def test_a_symlink_to_a_file_is_read(tmp_path: Path) -> None:
    by_torch(tmp_path / "file")
    (tmp_path / "latest").symlink_to("file")
    assert Checkpoint.read(tmp_path / "latest").facts["step"] == 3


def test_the_cache_of_another_user_is_not_believed(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a file away needs root")
    file = tmp_path / "speeds.json"
    cached(file, "machine", lambda: OwnSpeeds(1.0, 1.0))
    assert set(read(file)) == {"machine"}
    os.chown(file, OTHER_USER, OTHER_USER)
    assert read(file) == {}


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(np.zeros(100, np.uint8).tobytes())
    assert len(read_own(tmp_path / "file", 100)) == 100
    with pytest.raises(OSError, match="100 bytes, more than 99"):
        read_own(tmp_path / "file", 99)
