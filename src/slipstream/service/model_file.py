"""``model.safetensors``: a whole classifier in one file, without pickle.

A safetensors file: 8 bytes with the header's length, the header in JSON, the tensors. Its
metadata has ``slipstream.text`` (labels, temperatures, settings) and ``slipstream.sha256``, over
that text and all tensors with their names, types and shapes. Every size is checked against the
file's before memory is reserved for it. A damaged file is never used.

Words and features are tensors of hashes, not a part of the JSON: safetensors limits headers to
100 MB, and 10⁶ features as JSON take seconds to read.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from slipstream.runtime.files.whole_files import open_regular, write_whole
from slipstream.service.features import FIRST_WORD
from slipstream.service.refusals import Damaged
from slipstream.service.settings import TextSetting
from slipstream.service.words import TOKENIZER

FORMAT = 1
HEADER_NBYTES = 16 << 20  # 3,000 labels of 256 characters, escaped, fit
MOST_NBYTES = 4 << 30
LONGEST = 1024  # words of a text, or of a window
DTYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "U64": np.uint64}
TEXT, SHA256 = "slipstream.text", "slipstream.sha256"

Array = npt.NDArray[Any]


class ModelHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a model file says beside its tensors.

    Attributes:
        labels: The classes' names.
        temperatures: Of the deep and of the wide part.
        setting: The net's sizes.
    """

    labels: list[str]
    temperatures: tuple[float, float]
    setting: TextSetting
    format: int = FORMAT
    tokenizer: str = TOKENIZER


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Format(msgspec.Struct):
    """The part of a head that all formats have."""

    format: int


def shapes_of(head: ModelHead, words: int, features: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The type and shape of every tensor of a model.

    >>> head = ModelHead(labels=["a", "b"], temperatures=(1.0, 1.0), setting=TextSetting())
    >>> shapes_of(head, 10, 20)["wide"]
    ('F32', (21, 2))
    """
    setting, classes = head.setting, len(head.labels)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "words": ("U64", (words,)),
        "features": ("U64", (features,)),
        "idf": ("F32", (features,)),
        "shares": ("F32", (classes,)),
        "embedding": ("F32", (words + FIRST_WORD, setting.dimensions)),
        "classifier": ("F32", (setting.maps * len(setting.windows), classes)),
        "classifier.bias": ("F32", (classes,)),
        "wide": ("F32", (features + 1, classes)),
    }
    for window in setting.windows:
        shapes[f"window{window}"] = ("F32", (window * setting.dimensions, setting.maps))
        shapes[f"window{window}.bias"] = ("F32", (setting.maps,))
    return shapes


def nbytes_of(head: ModelHead, words: int, features: int) -> int:
    """The bytes of a model's tensors.

    >>> head = ModelHead(labels=["a", "b"], temperatures=(1.0, 1.0), setting=TextSetting())
    >>> nbytes_of(head, 10, 20)
    471048
    """
    shapes = shapes_of(head, words, features).values()
    return sum(math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize for dtype, shape in shapes)


def write_model(path: Path, head: ModelHead, tensors: Mapping[str, Array]) -> None:
    """Write a model file: it appears complete, or not at all.

    Args:
        path: Where.
        head: Labels, temperatures and sizes.
        tensors: Those of ``shapes_of``.

    Raises:
        CheckpointError: It cannot be written.
    """
    own = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    text = msgspec.json.encode(head).decode()
    write_whole(path, [save(own, {TEXT: text, SHA256: _digest(text, own)})])


def read_model(path: Path) -> tuple[ModelHead, dict[str, Array]]:
    """Read a model file.

    Args:
        path: Where it is.

    Returns:
        Its head and its tensors.

    Raises:
        Damaged: It cannot be read, was damaged, or has another format.
    """
    try:
        with open_regular(path) as file:
            return _read(file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise Damaged(f"the model file cannot be read: {error.strerror}") from error


def _read(file: BinaryIO, size: int) -> tuple[ModelHead, dict[str, Array]]:
    length = int.from_bytes(file.read(8), "little")
    if not 8 <= size <= MOST_NBYTES or length > min(size - 8, HEADER_NBYTES):
        raise Damaged("the model file is cut off, or is no model file")
    try:
        header: dict[str, Any] = msgspec.json.decode(file.read(length), type=dict[str, Any])
        metadata = msgspec.convert(header.pop("__metadata__", None), dict[str, str])
        entries = msgspec.convert(header, dict[str, _Tensor])
        text, digest = metadata[TEXT], metadata[SHA256]
        head = _decode_head(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise Damaged("the model file's header is damaged, or it is no model file") from error
    _check(head, entries, size - 8 - length)
    data = np.fromfile(file, np.uint8, size - 8 - length)
    if len(data) != size - 8 - length:
        raise Damaged("the model file became shorter while it was read")
    tensors = {name: _view(data, entry) for name, entry in entries.items()}
    if digest != _digest(text, tensors):
        raise Damaged("the model file is damaged: its checksum is not that of its content")
    return head, tensors


def _decode_head(text: str) -> ModelHead:
    found = msgspec.json.decode(text, type=_Format).format
    if found != FORMAT:
        raise Damaged(
            f"the model file has format {found}; this version of slipstream reads {FORMAT}"
        )
    head = msgspec.json.decode(text, type=ModelHead)
    setting, sizes = head.setting, [head.setting.dimensions, head.setting.maps]
    if (
        min([*sizes, *setting.windows, len(setting.windows), len(head.labels)]) < 1
        or max([setting.text_words, *setting.windows]) > LONGEST
        or not 2 <= setting.characters[0] <= setting.characters[1] <= LONGEST
        or not all(0 < t < math.inf for t in head.temperatures)
        or head.tokenizer != TOKENIZER
    ):
        raise Damaged("the model file's settings make no sense")
    return head


def _check(head: ModelHead, entries: dict[str, _Tensor], nbytes: int) -> None:
    """Names, types, shapes and places are those of such a model, and fill the file exactly."""
    counted = [entries.get(name) for name in ("words", "features")]
    sizes = [entry.shape[0] for entry in counted if entry is not None and len(entry.shape) == 1]
    if len(sizes) != 2 or min(sizes) < 0 or max(sizes) > nbytes:
        raise Damaged("the model file's header is damaged, or it is no model file")
    expected = shapes_of(head, *sizes)
    if {name: (entry.dtype, tuple(entry.shape)) for name, entry in entries.items()} != expected:
        raise Damaged("the model file's tensors do not fit its settings")
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.data_offsets):
        length = math.prod(entry.shape) * np.dtype(DTYPES[entry.dtype]).itemsize
        if entry.data_offsets != (end, end + length):
            raise Damaged("the model file's tensors overlap or have gaps")
        end += length
    if end != nbytes:
        raise Damaged(f"the model file has {nbytes:,} bytes of tensors instead of {end:,}")


def _view(data: Array, entry: _Tensor) -> Array:
    begin, end = entry.data_offsets
    return data[begin:end].view(DTYPES[entry.dtype]).reshape(entry.shape)


def _digest(text: str, tensors: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, array in sorted(tensors.items()):
        digest.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()
