"""Checkpoints of shared weights: whole, or passed over."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import CheckpointError
from slipstream.runtime.files.checkpoint_format import Piece, unpack
from slipstream.runtime.files.whole_files import sweep_drafts
from slipstream.runtime.shared_memory.checkpoints import Snapshot, keep, kept_in, newest_in
from slipstream.torch.checkpoints.checkpoint import Checkpoint

FACTS = {"strategy": "gadei", "workers": 2, "optimizer": {"$dict": [["kind", "SGD"]]}}


def snapshot(version: int, values: int = 1000) -> Snapshot:
    data = np.full(values, version, np.float32).tobytes()
    pieces = {
        "model/w": Piece("float32", (values,), data),
        "model/n": Piece("int64", (), np.int64(version).tobytes()),
        "model/half": Piece("bfloat16", (2,), b"\x80\x3f\x00\x40"),
        "model/nothing": Piece("float64", (0, 3), b""),
    }
    return Snapshot(pieces, {**FACTS, "step": version})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    snapshot(7).write(tmp_path / "file")
    read = Snapshot.read(tmp_path / "file")
    assert read.version == 7
    assert {n: (p.dtype, p.shape, bytes(p.data)) for n, p in read.pieces.items()} == {
        n: (p.dtype, p.shape, bytes(p.data)) for n, p in snapshot(7).pieces.items()
    }


def test_torch_reads_the_same(tmp_path: Path) -> None:
    snapshot(7).write(tmp_path / "file")
    checkpoint = Checkpoint.read(tmp_path / "file")
    assert checkpoint.facts["step"] == 7
    assert (checkpoint.tensors["model/w"] == 7).all()
    assert checkpoint.tensors["model/n"] == 7
    assert checkpoint.tensors["model/half"].tolist() == [1.0, 2.0]
    assert checkpoint.tensors["model/half"].dtype == torch.bfloat16
    assert unpack(checkpoint.facts["optimizer"], checkpoint.tensors) == {"kind": "SGD"}


def test_two_are_kept(tmp_path: Path) -> None:
    for version in (1, 2, 30):
        keep(tmp_path, snapshot(version))
    assert [Snapshot.read(path).version for path in kept_in(tmp_path)] == [30, 2]
    # Of a run that began again earlier, what came later is not the newest.
    keep(tmp_path, snapshot(10))
    assert [Snapshot.read(path).version for path in kept_in(tmp_path)] == [10, 2]


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_one_is_passed_over(tmp_path: Path, seed: int) -> None:
    keep(tmp_path, snapshot(1))
    keep(tmp_path, snapshot(2))
    newest = kept_in(tmp_path)[0]
    content = bytearray(newest.read_bytes())
    chance = random.Random(seed)
    if seed % 2:
        del content[chance.randrange(len(content)) :]
    else:
        at = chance.randrange(len(content))
        content[at] ^= 1 << chance.randrange(8)
    newest.write_bytes(content)
    found, wrong = newest_in(tmp_path)
    assert found is not None
    # A bit may be one that means nothing, such as a blank; then all is as it was.
    assert found.version in ((1,) if seed % 2 or wrong else (2,))
    assert len(wrong) == (found.version == 1)
    expected = snapshot(found.version)
    assert {name: bytes(piece.data) for name, piece in found.pieces.items()} == {
        name: bytes(piece.data) for name, piece in expected.pieces.items()
    }
    assert expected.facts.items() <= found.facts.items()


def test_there_may_be_none(tmp_path: Path) -> None:
    assert newest_in(tmp_path / "nowhere") == (None, [])
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        Snapshot.read(tmp_path / "missing")


def test_what_cannot_be_used_is_not_passed_over(tmp_path: Path) -> None:
    """Else training would begin anew, and its checkpoints take the place of these."""
    first = tmp_path / "weights-000000000000001.safetensors"
    first.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is whole \(.*to begin anew, move them away"):
        newest_in(tmp_path)
    keep(tmp_path, snapshot(2))
    newest = tmp_path / "weights-000000000000003.safetensors"
    newest.mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read .*000003"):
        newest_in(tmp_path)
    newest.rmdir()
    later = snapshot(3)
    later.facts["format"] = 2
    later.write(newest)
    with pytest.raises(CheckpointError, match="has format 2, this slipstream reads 1"):
        newest_in(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_full_leaves_the_one_before(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "small", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        keep(disk, snapshot(1, 100_000))
        keep(disk, snapshot(2, 100_000))
        for version in range(3, 9):
            with pytest.raises(CheckpointError, match="No space left on device"):
                keep(disk, snapshot(version, 100_000))
            found, wrong = newest_in(disk)
            assert found is not None
            assert (found.version, wrong) == (2, [])
        assert len(list(disk.iterdir())) == 2
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="fork and limits as Linux has them")
def test_a_file_that_may_not_grow_leaves_the_one_before(tmp_path: Path) -> None:
    keep(tmp_path, snapshot(1))
    pid = os.fork()
    if pid == 0:  # files of this process may not grow beyond a little
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            keep(tmp_path, snapshot(2))
        except CheckpointError as error:
            os._exit(0 if "cannot write" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["weights-000000000000001.safetensors"]
    found, wrong = newest_in(tmp_path)
    assert found is not None
    assert (found.version, wrong) == (1, [])


@pytest.mark.skipif(sys.platform != "linux", reason="fork and kill as Linux has them")
def test_a_hundred_deaths_while_writing_lose_at_most_the_last(tmp_path: Path) -> None:
    chance = random.Random(0)
    version = 1
    keep(tmp_path, snapshot(version, 200_000))
    for death in range(100):
        pid = os.fork()
        if pid == 0:
            for later in range(version + 1, version + 1000):
                keep(tmp_path, snapshot(later, 200_000))
            os._exit(0)
        time.sleep(chance.uniform(0.0, 0.02))
        while death == 0 and len(kept_in(tmp_path)) < 2:
            time.sleep(0.001)  # one at least has written something, however slow the disk is
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found, wrong = newest_in(tmp_path)
        assert found is not None
        assert wrong == []
        assert found.version >= version
        assert set(np.frombuffer(found.pieces["model/w"].data, np.float32)) == {found.version}
        version = found.version
    sweep_drafts(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}
    assert version > 1


def test_a_directory_never_takes_a_broken_one_after_a_finite_one(tmp_path: Path) -> None:
    for version in (1, 2):
        keep(tmp_path, snapshot(version))
    broken = snapshot(3)
    broken.pieces["model/half"] = Piece("bfloat16", (2,), b"\x80\x3f\x80\x7f")  # 1, infinity
    for _ in range(3):
        with pytest.raises(CheckpointError, match="model/half is not finite"):
            keep(tmp_path, broken)
    assert [path.name[-13] for path in kept_in(tmp_path)] == ["2", "1"]
    kept_in(tmp_path)[0].write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="model/half is not finite"):
        keep(tmp_path, broken)  # the one before is finite, too
    found, _ = newest_in(tmp_path)
    assert found is not None
    assert found.version == 1


def test_what_was_never_finite_is_kept(tmp_path: Path) -> None:
    for version in (1, 2):
        masked = snapshot(version)
        masked.pieces["model/half"] = Piece("bfloat16", (2,), b"\x80\x3f\x80\x7f")
        keep(tmp_path, masked)
    assert len(kept_in(tmp_path)) == 2
