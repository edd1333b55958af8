"""The MNIST family's format: a magic number, big-endian sizes, then bytes."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from slipstream.apps.bench.data.examples import Split, TensorExamples
from slipstream.apps.bench.reading import read_bytes, refused

UNSIGNED_BYTES = 0x08
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_WAY_OUT = "take the files as they are published (train-images-idx3-ubyte.gz and so on)"


def read_idx(path: Path) -> Tensor:
    """Read the array in one file, compressed or not."""
    content = read_bytes(path, _WAY_OUT)
    if len(content) < 4 or content[:2] != b"\0\0":
        raise refused(path, None, "not an idx file: it does not begin with two zeros", _WAY_OUT)
    kind, dimensions = content[2], content[3]
    if kind != UNSIGNED_BYTES:
        raise refused(path, None, f"holds type 0x{kind:02x}, not unsigned bytes (0x08)", _WAY_OUT)
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise refused(path, None, f"ends within its {dimensions} sizes", "fetch it again")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        problem = f"announces {math.prod(shape)} bytes and holds {len(content) - start}"
        raise refused(path, None, problem, "fetch it again")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].view(shape)


def read_images(folder: Path) -> Split[TensorExamples]:
    """Read training and test images of one folder."""
    train = _pair(folder, "train")
    test = _pair(folder, "test")
    classes = 1 + max(int(train.targets.max()), int(test.targets.max()))
    return Split(train, test, classes, origin=str(folder))


def _pair(folder: Path, part: str) -> TensorExamples:
    images_path, labels_path = (_packed_or_not(folder / name) for name in FILES[part])
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.dim() != 3:
        raise refused(images_path, None, f"has {images.dim()} dimensions, not 3", _WAY_OUT)
    if len(images) and not images.numel():
        raise refused(images_path, None, "its images have no pixels", _WAY_OUT)
    if labels.dim() != 1 or len(labels) != len(images) or not len(labels):
        raise refused(
            labels_path,
            None,
            f"{labels.numel()} labels for the {len(images)} images of {images_path.name}",
            "take both from the same set",
        )
    return TensorExamples(images.unsqueeze(1), labels.long())


def _packed_or_not(path: Path) -> Path:
    return path if path.exists() else path.with_name(f"{path.name}.gz")
