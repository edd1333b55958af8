"""The file of a checkpoint: safetensors, with JSON about the job in its header. Needs no torch.

A job that trains several pairs of a model and an optimizer has a section for each, whose tensors
have names that begin with ``pair0/``, ``pair1/`` and so on. With one pair there are no such
prefixes.

A file may be truncated, damaged, or written by another program. The result of ``read`` is complete
and matches its checksum, and its facts have the types of ``Facts``. The job checks whether it is
for this model and optimizer.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
import numpy as np

from slipstream._native import crc32c
from slipstream.errors import CheckpointError, DamagedCheckpoint
from slipstream.runtime.files.whole_files import open_regular

FORMAT = 1
MOST_HEADER_NBYTES = 100_000_000  # safetensors' own limit
TORCH_MAGIC = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")  # of torch.serialization
TORCH_HEAD_NBYTES = 512  # a zip's first entry, whose name begins with that of the file
MOST_NESTED = 200  # brackets within brackets, in JSON
MOST_STEPS = 10**15 - 1  # a checkpoint's name has as many digits
PREFIXES = (
    *("model/", "optimizer/", "averaged/", "outer/", "outer state/", "precise/", "residual/"),
    "local/",
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor as bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


# The names of dtypes in a safetensors file.
SHORT = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
# Including those that only torch writes.
FULL = {short: full for full, short in SHORT.items()} | {
    "C64": "complex64",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
ITEM_NBYTES = {
    short: next((n for n in (64, 32, 16) if short.endswith(str(n))), 8) // 8 for short in FULL
}

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)]


class Facts(msgspec.Struct, frozen=True):
    """The content of a checkpoint besides its tensors."""

    format: int
    step: Count
    strategy: str
    workers: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)]
    random: list[dict[str, Any]]  # by rank; empty for a rank that was lost
    optimizer: dict[str, Any]
    taken: list[Count] = []
    job: str = ""
    steps: list[Count] = []  # by pair; empty with one pair
    parts: str = ""  # the token of workers' own parts, if there are any
    local: list[Any] = []  # in such a part: by pair, the exchange that was in flight


class Entry(msgspec.Struct, frozen=True):
    """A header's entry for one tensor."""

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]

    @property
    def nbytes(self) -> int:
        """The size computed from shape and dtype."""
        return math.prod(self.shape) * ITEM_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a file. ``pairs`` names the tensors of complex numbers, stored as pairs."""

    pieces: dict[str, Piece]
    facts: dict[str, Any]
    pairs: list[str]


class Foreign(ValueError):
    """An error: a safetensors file that slipstream did not write."""


class TorchFile(ValueError):
    """An error: a file of ``torch.save``."""


def read(path: Path) -> Content:
    """Read and check a file.

    Raises:
        DamagedCheckpoint: The file was damaged after it was written, or never was a checkpoint.
        CheckpointError: It cannot be read, or has another format.
    """
    try:
        with open_regular(path) as file:
            content = read_content(file)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except MemoryError as error:
        raise CheckpointError(f"cannot read {path}: there is not enough memory for it") from error
    except Foreign:
        raise DamagedCheckpoint(
            f"{path} is a safetensors file but not a slipstream checkpoint"
        ) from None
    except TorchFile:
        raise CheckpointError(
            f"{path} is a file of torch.save, and job.load reads files of job.save: load it with "
            "torch.load and model.load_state_dict, before job.distribute"
        ) from None
    except (ValueError, msgspec.MsgspecError, OverflowError) as error:
        raise DamagedCheckpoint(f"{path} is damaged or no checkpoint: {error}") from error
    if content.facts["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.facts['format']!r:.40}, this slipstream reads {FORMAT}"
        )
    try:
        msgspec.convert(content.facts, Facts)
    except msgspec.ValidationError as error:
        raise DamagedCheckpoint(f"{path} is damaged or no checkpoint: {error}") from error
    return content


def read_content(file: BinaryIO) -> Content:
    """Read and check a file's content; raise ValueError or msgspec's errors."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(size - 8, MOST_HEADER_NBYTES):
        file.seek(0)
        if is_torch_head(file.read(TORCH_HEAD_NBYTES)):
            raise TorchFile
        raise ValueError(f"it has {size} bytes, and gives its header {length}")
    entries, about = parse_header(file.read(length))
    if "slipstream" not in about or "crc" not in about:
        raise Foreign
    check_places(entries, size - 8 - length)
    pieces = {name: read_piece(file, 8 + length, entry) for name, entry in entries.items()}
    if about["crc"] != str(crc(about["slipstream"], pieces)):
        raise ValueError("its content does not match its checksum")
    return Content(pieces, parse_facts(about["slipstream"]), parse_pairs(about, pieces))


def is_torch_head(head: bytes) -> bool:
    """Return whether a file begins like one of ``torch.save``: a zip whose first entry is its
    pickle, or, until torch 1.6, several pickles, the first of which is a number. None is
    unpickled."""
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    is_zip = head.startswith(b"PK\x03\x04") and name.endswith(b"/data.pkl")
    return is_zip or (head.startswith(b"\x80") and TORCH_MAGIC in head[:32])


def parse_header(text: bytes) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the entries by name, and the metadata."""
    check_nesting(text)
    raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    about = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
    entries = {name: msgspec.json.decode(entry, type=Entry) for name, entry in raw.items()}
    for name, entry in entries.items():
        if entry.dtype not in FULL:
            raise ValueError(f"{name!r} has the unknown dtype {entry.dtype!r}")
    return entries, about


def parse_facts(text: str) -> dict[str, Any]:
    """Return the facts as plain data."""
    check_nesting(text.encode())
    facts = json.loads(text)
    if not isinstance(facts, dict) or "format" not in facts:
        raise ValueError("it names no format")
    msgspec.msgpack.encode(facts)  # as it is sent to other ranks: no larger numbers, valid text
    return facts


def parse_pairs(about: Mapping[str, str], pieces: Mapping[str, Piece]) -> list[str]:
    """Return the names of tensors that hold complex numbers as pairs."""
    pairs = msgspec.json.decode(about.get("pairs", "[]"), type=list[str])
    for name in pairs:
        piece = pieces.get(name)
        if piece is None or piece.dtype != "float64" or piece.shape[-1:] != (2,):
            raise ValueError(f"{name!r} holds no pairs of float64")
    if len(set(pairs)) < len(pairs):
        raise ValueError("it names pairs twice")
    return pairs


TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+|[\[{]|[\]}]', re.DOTALL)


def check_nesting(text: bytes) -> None:
    """Check the depth of JSON before it is parsed: parsers recurse for every level."""
    depth = 0
    for token in TOKEN.finditer(text):
        first = token[0][:1]
        depth += (first in b"[{") - (first in b"]}")
        if depth > MOST_NESTED:
            raise ValueError(f"its JSON is nested deeper than {MOST_NESTED} levels")


def check_places(entries: Mapping[str, Entry], room: int) -> None:
    """Check that tensors are stored one after the other, and fill the file."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, stop = entry.data_offsets
        if math.prod(max(1, size) for size in entry.shape) > MOST_STEPS:  # an empty one may be huge
            raise ValueError(f"{name!r} has an impossible shape")
        if begin != end or stop - begin != entry.nbytes:
            raise ValueError(f"{name!r} does not lie where its size would have it")
        if stop > room:
            raise ValueError("a tensor lies outside of it")
        end = stop
    if end != room:
        raise ValueError(f"it has {room - end} bytes more than its tensors")


def read_piece(file: BinaryIO, at: int, entry: Entry) -> Piece:
    """Read a tensor into its own memory, so that keeping one does not keep all."""
    data = np.empty(entry.nbytes, np.uint8)
    file.seek(at + entry.data_offsets[0])
    if file.readinto(memoryview(data)) != entry.nbytes:  # type: ignore[attr-defined]
        raise ValueError("it became shorter while it was read")
    if entry.dtype == "BOOL" and (data > 1).any():
        raise ValueError("a bool is neither true nor false")
    return Piece(FULL[entry.dtype], tuple(entry.shape), memoryview(data))


def crc(facts: str, pieces: Mapping[str, Piece]) -> int:
    """Return a checksum of everything: a disk may lose a bit without an error."""
    total = crc32c(facts.encode())
    for name in sorted(pieces):
        piece = pieces[name]
        head = f"{name} {piece.dtype} {list(piece.shape)}"
        total = crc32c(piece.data, crc32c(head.encode(), total))
    return total


def misfit(path: Path, error: Exception) -> CheckpointError:
    """Return the error of a valid checkpoint of another model."""
    return CheckpointError(
        f"{path} does not fit this job: {error}; load a checkpoint of the same model and optimizer"
    )


# ---- sections


SECTION = re.compile(r"^pair[0-9]+/")


def section_name(pair: int, pairs: int) -> str:
    """Return the prefix of the names of a pair's tensors."""
    return f"pair{pair}/" if pairs > 1 else ""


def is_model(name: str) -> bool:
    """Return whether a tensor belongs to a model, of any pair."""
    return SECTION.sub("", name, count=1).startswith("model/")


def pairs_in(facts: Mapping[str, Any]) -> int:
    """Return how many pairs of a model and an optimizer a file has."""
    return max(1, len(facts.get("steps", ())))


def sections_in(
    facts: Mapping[str, Any], tensors: Mapping[str, T]
) -> list[tuple[dict[str, Any], dict[str, T]]]:
    """Return, by pair, facts and tensors as in a file of this pair alone.

    Raises:
        ValueError: A tensor belongs to no pair, or there is not one optimizer for each.
    """
    pairs = pairs_in(facts)
    if pairs == 1:
        return [(dict(facts), dict(tensors))]
    packed = facts["optimizer"].get("$list")
    if not isinstance(packed, list) or len(packed) != pairs:
        raise ValueError(f"it does not have the states of {pairs} optimizers")
    sections: list[dict[str, T]] = [{} for _ in packed]
    heads = [section_name(number, pairs) for number in range(pairs)]
    for name, tensor in tensors.items():
        number = next((n for n, head in enumerate(heads) if name.startswith(head)), None)
        if number is None:
            raise ValueError(f"it holds {name!r}, which belongs to no pair")
        sections[number][name.removeprefix(heads[number])] = tensor
    return [
        ({**facts, "step": step, "optimizer": optimizer}, own)
        for step, optimizer, own in zip(facts["steps"], packed, sections, strict=True)
    ]


# ---- an optimizer's state within the facts


class OptimizerState(msgspec.Struct, frozen=True):
    """State by parameter name, and the settings of parameter groups."""

    kind: str
    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]


def optimizer_in(facts: Mapping[str, Any], tensors: Mapping[str, T]) -> OptimizerState:
    """Return the optimizer's state with its tensors in place; raise ValueError if it has none."""
    unclaimed = {name: t for name, t in tensors.items() if name.startswith("optimizer/")}
    saved = unpack(facts["optimizer"], unclaimed)
    for name in unclaimed:
        raise ValueError(f"nothing refers to its tensor {name!r}")
    try:
        return msgspec.convert(saved, OptimizerState)
    except msgspec.ValidationError as error:
        raise ValueError(f"its optimizer state is none: {error}") from error


def unpack(value: Any, tensors: dict[str, T]) -> Any:
    """Reverse ``pack``. Tensors are removed from ``tensors``, so each is used once."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind, content = next(iter(value.items())) if is_single(value) else ("", None)
    if kind == "$tensor" and isinstance(content, str) and content in tensors:
        return tensors.pop(content)
    if kind == "$tensor":
        raise ValueError(f"it refers to {content!r:.80}, which it has not, or has elsewhere")
    if kind == "$dict" and isinstance(content, list) and all(map(is_item, content)):
        unpacked = {key: unpack(item, tensors) for key, item in content}
        if len(unpacked) == len(content):
            return unpacked
    if kind in ("$tuple", "$list") and isinstance(content, list):
        items = (unpack(item, tensors) for item in content)
        return tuple(items) if kind == "$tuple" else list(items)
    raise ValueError(f"{value!r:.80} is no value that a checkpoint holds")


def is_single(value: Any) -> bool:
    """Return whether this is a dict with one item."""
    return isinstance(value, dict) and len(value) == 1


def is_item(value: Any) -> bool:
    """Return whether this is a key and its value."""
    return isinstance(value, list) and len(value) == 2 and not isinstance(value[0], dict | list)


def check_names(names: Iterable[str]) -> None:
    """Check the names of tensors of one pair; raise ValueError for another name."""
    for name in names:
        if SECTION.match(name):
            raise ValueError("it holds several models or optimizers; this job trains one")
        if not name.startswith(PREFIXES):
            raise ValueError(f"it holds {name!r}, which no checkpoint has")
