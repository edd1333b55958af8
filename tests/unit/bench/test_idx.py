from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.apps.bench.data import read_idx, read_images
from slipstream.errors import ConfigError


def idx(values: torch.Tensor) -> bytes:
    sizes = struct.pack(f">{values.dim()}I", *values.shape)
    return bytes([0, 0, 8, values.dim()]) + sizes + values.numpy().tobytes()


def write_set(folder: Path, *, train: int = 6, test: int = 2, labels: int | None = None) -> None:
    for part, count in (("train", train), ("t10k", test)):
        images = torch.arange(count * 12, dtype=torch.uint8).view(count, 3, 4)
        targets = torch.arange(count if labels is None else labels, dtype=torch.uint8)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(targets))


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_arrays_come_back(tmp_path_factory: pytest.TempPathFactory, shape: list[int]) -> None:
    values = torch.randint(256, shape, dtype=torch.uint8)
    path = tmp_path_factory.mktemp("idx") / "array"
    path.write_bytes(idx(values))
    assert torch.equal(read_idx(path), values)


def test_a_folder_is_two_parts_packed_or_not(tmp_path: Path) -> None:
    write_set(tmp_path)
    split = read_images(tmp_path)
    assert (len(split.train), len(split.test), split.classes) == (6, 2, 6)
    images, labels = split.train.take(torch.tensor([5, 0]))
    assert images.shape == (2, 1, 3, 4)
    assert images.max() == pytest.approx(71 / 255)
    assert labels.tolist() == [5, 0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not an idx file"),
        (b"\0\1\10\1", "not an idx file"),
        (b"\0\0\15\1" + struct.pack(">I", 1), "type 0x0d"),
        (b"\0\0\10\3" + struct.pack(">I", 1), "within its 3 sizes"),
        (b"\0\0\10\1" + struct.pack(">I", 9) + b"1234", "announces 9 bytes and holds 4"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "broken"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"broken: .*{said}"):
        read_idx(path)


def test_a_truncated_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "half.gz"
    path.write_bytes(gzip.compress(b"\0\0\10\1" + bytes(5000))[:-20])
    with pytest.raises(ConfigError, match=r"half\.gz: cannot be unpacked .*fetch it again"):
        read_idx(path)


def test_missing_and_mismatched_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train-images-idx3-ubyte\.gz: cannot be read"):
        read_images(tmp_path)
    write_set(tmp_path, labels=5)
    with pytest.raises(ConfigError, match="5 labels for the 6 images"):
        read_images(tmp_path)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_real_ones(real_data: Callable[[str], Path], name: str) -> None:
    split = read_images(real_data(name))
    assert (len(split.train), len(split.test), split.classes) == (60_000, 10_000, 10)
    assert split.train.inputs.shape[1:] == (1, 28, 28)
    assert split.train.targets.bincount().min() > 5000
