"""Matrices on the wire: a small header, then the memory, cut where it is too large for a frame."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from slipstream._native import mean_into, quantize_pack
from slipstream.codecs.quantized import FEW_BITS, SCALE_BYTES
from slipstream.errors import FrameRefused
from slipstream.types import ITEM_BYTES, LARGEST_CHUNK_BYTES, Buffer, Layer, Values

HEADER = struct.Struct("<QB7x")  # rows, and a number for the dtype
DTYPES = ("", "float32", "float64", "bfloat16", "float16", "int64", "int8", "int4")
BYTES = {**ITEM_BYTES, "int64": 8}
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Matrix:
    """``rows`` rows in one block of memory, whose width the receiver knows."""

    rows: int
    data: Bytes
    dtype: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Requirements of a matrix: how many values a row has, and in which precisions; and the
    precision in which matrices are stacked, if it is not the layer's."""

    width: int
    dtypes: Sequence[str] = (*ITEM_BYTES, *FEW_BITS)
    stacked_as: str = ""


class LayerMath(Protocol):
    """Computes a layer's gradient: torch at workers, numpy at servers.

    Results are added to an existing gradient, as torch does.
    """

    def multiply(self, layer: Layer, dy: Values, x: Values, rows: int, share: float) -> None:
        """share·dYᵀX for the weight (XᵀdY if it is transposed), share·Σ dY for the bias."""
        ...

    def add_rows(self, layer: Layer, ids: Values, values: Values, rows: int, share: float) -> None:
        """Add share·values to these rows of the weight."""
        ...


class Scratch:
    """Memory for stacked matrices, reused from round to round."""

    def __init__(self) -> None:
        self._held: dict[int, Bytes] = {}

    def take(self, place: int, nbytes: int) -> Bytes:
        held = self._held.get(place)
        if held is None or held.nbytes < nbytes:
            held = self._held[place] = np.empty(nbytes, np.uint8)
        return held[:nbytes]


def matrix_nbytes(numel: int, dtype: str) -> int:
    """What so many values of a matrix take on the wire, without the header."""
    if (few := FEW_BITS.get(dtype)) is not None:
        # Not by the kernel's own function: a header may claim more values than that can count.
        return -(-numel // few.block) * SCALE_BYTES + -(-numel * few.bits // 8)
    return numel * BYTES[dtype]


def quantize(out: Bytes, values: Bytes, dtype: str, seed: int) -> None:
    """Write float32 values in few bits, each rounded up or down by chance.

    A product of rounded matrices has no error that could be kept for the next time. With
    independent chances its expected value is the exact product.
    """
    quantize_pack(out, values, None, FEW_BITS[dtype].bits, FEW_BITS[dtype].block, seed)


def frame_sizes(nbytes: int) -> list[int]:
    """The sizes of the frames for so many bytes; none for 0 bytes."""
    whole, rest = divmod(nbytes, LARGEST_CHUNK_BYTES)
    return [LARGEST_CHUNK_BYTES] * whole + [rest] * bool(rest)


def to_frames(matrix: Matrix) -> tuple[Buffer, ...]:
    """The header and the memory itself, which must not change until it has been sent."""
    sizes = frame_sizes(matrix.data.nbytes)
    stops = list(itertools.accumulate(sizes))
    header = HEADER.pack(matrix.rows, DTYPES.index(matrix.dtype))
    parts = (matrix.data[stop - size : stop] for size, stop in zip(sizes, stops, strict=True))
    return (header, *parts)


def frames_taken(frames: Sequence[Buffer], wanted: Wanted) -> tuple[int, str, int]:
    """Rows and dtype of the first matrix in ``frames``, and how many frames it takes.

    Raises:
        FrameRefused: The frames do not begin with such a matrix.
    """
    header = memoryview(frames[0]) if frames else memoryview(b"")
    if header.nbytes != HEADER.size:
        raise FrameRefused(f"{header.nbytes} bytes where a matrix's header takes {HEADER.size}")
    rows, code = HEADER.unpack(header)
    dtype = DTYPES[code] if code < len(DTYPES) else ""
    if dtype not in wanted.dtypes:
        raise FrameRefused(f"a matrix of type {dtype or code} where {wanted.dtypes} are taken")
    if rows and not wanted.width:
        raise FrameRefused(f"{rows} rows of a matrix without columns")
    nbytes = matrix_nbytes(rows * wanted.width, dtype)
    # Before anything is counted out: a header may claim more than memory has.
    there = sum(memoryview(frame).nbytes for frame in frames[1:])
    if nbytes > there:
        raise FrameRefused(f"{there} bytes where {rows} rows take {nbytes}")
    sizes = frame_sizes(nbytes)
    if [memoryview(frame).nbytes for frame in frames[1 : 1 + len(sizes)]] != sizes:
        raise FrameRefused(f"{rows} rows in {nbytes} bytes are cut into other frames")
    return rows, dtype, 1 + len(sizes)


def stack(
    matrices: Sequence[tuple[int, str, Sequence[Buffer]]],
    width: int,
    dtype: str,
    scratch: Scratch,
    place: int,
) -> Values:
    """Stack matrices in the given order; each is given as its rows, its dtype and its frames."""
    row_bytes = width * BYTES[dtype]
    whole = Values(scratch.take(place, sum(rows for rows, _, _ in matrices) * row_bytes), dtype)
    start = 0
    for rows, given, frames in matrices:
        out = whole.data[start : start + rows * row_bytes]
        start += rows * row_bytes
        if given == dtype:
            read_into(out, frames)
        elif rows:
            landing = landed(rows * width, given, frames)
            mean_into(out, [landing.data], landing.dtype, 1.0, out_dtype=dtype)
    return whole


def landed(numel: int, dtype: str, frames: Sequence[Buffer]) -> Values:
    """The values of a matrix that came in another precision than it is stacked in."""
    content = np.empty(matrix_nbytes(numel, dtype), np.uint8)
    read_into(content, frames)
    if dtype not in FEW_BITS:
        return Values(content, dtype)
    values = Values.empty(numel, "float32")
    FEW_BITS[dtype].decode_into([content], values)
    return values


def read_into(out: Bytes, frames: Sequence[Buffer]) -> None:
    """Copy the memory of one matrix, without its header, frame by frame."""
    start = 0
    for frame in frames:
        size = memoryview(frame).nbytes
        out[start : start + size] = np.frombuffer(frame, np.uint8)
        start += size
