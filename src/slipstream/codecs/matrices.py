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
    """Requirements of a matrix: the number of values in a row, the precisions that are accepted,
    and the precision in which matrices are stacked, if it is not the layer's."""

    width: int
    dtypes: Sequence[str] = (*ITEM_BYTES, *FEW_BITS)
    stacked_as: str = ""


class LayerMath(Protocol):
    """The computation of a layer's gradient: torch at workers, numpy at servers.

    Results are added to an existing gradient, as torch does.
    """

    def multiply(self, layer: Layer, dy: Values, x: Values, rows: int, share: float) -> None:
        """Add share·dYᵀX to the weight's gradient (XᵀdY if transposed), share·Σ dY to the bias'."""
        ...

    def add_rows(self, layer: Layer, ids: Values, values: Values, rows: int, share: float) -> None:
        """Add share·values to these rows of the weight."""
        ...


class Scratch:
    """Memory for stacked matrices, reused from round to round."""

    def __init__(self) -> None:
        self._memories: dict[int, Bytes] = {}

    def take(self, place: int, nbytes: int) -> Bytes:
        memory = self._memories.get(place)
        if memory is None or memory.nbytes < nbytes:
            memory = self._memories[place] = np.empty(nbytes, np.uint8)
        return memory[:nbytes]


def matrix_nbytes(numel: int, dtype: str) -> int:
    """Return the bytes of ``numel`` values of a matrix on the wire, without the header."""
    if (few := FEW_BITS.get(dtype)) is not None:
        # The kernel's own function would overflow: a header may claim more values than it can
        # count.
        return -(-numel // few.block) * SCALE_BYTES + -(-numel * few.bits // 8)
    return numel * BYTES[dtype]


def quantize(out: Bytes, values: Bytes, dtype: str, seed: int) -> None:
    """Write float32 values in few bits, each rounded up or down at random.

    Rounding errors of a product's matrices cannot be kept for the next step. With independent
    random numbers the expected product is the exact one.
    """
    quantize_pack(out, values, None, FEW_BITS[dtype].bits, FEW_BITS[dtype].block, seed)


def frame_sizes(nbytes: int) -> list[int]:
    """Return the sizes of the frames for so many bytes; none for 0 bytes."""
    whole, rest = divmod(nbytes, LARGEST_CHUNK_BYTES)
    return [LARGEST_CHUNK_BYTES] * whole + [rest] * bool(rest)


def to_frames(matrix: Matrix) -> tuple[Buffer, ...]:
    """Return the header and the memory itself, which must not change until it has been sent."""
    sizes = frame_sizes(matrix.data.nbytes)
    stops = list(itertools.accumulate(sizes))
    header = HEADER.pack(matrix.rows, DTYPES.index(matrix.dtype))
    parts = (matrix.data[stop - size : stop] for size, stop in zip(sizes, stops, strict=True))
    return (header, *parts)


def frames_taken(frames: Sequence[Buffer], wanted: Wanted) -> tuple[int, str, int]:
    """Return the rows and dtype of the first matrix in ``frames``, and how many frames it takes.

    Raises:
        FrameRefused: The frames do not begin with such a matrix.
    """
    header = memoryview(frames[0]) if frames else memoryview(b"")
    if header.nbytes != HEADER.size:
        raise FrameRefused(f"matrix header of {header.nbytes} bytes: expected {HEADER.size}")
    rows, code = HEADER.unpack(header)
    dtype = DTYPES[code] if code < len(DTYPES) else ""
    if dtype not in wanted.dtypes:
        raise FrameRefused(f"matrix of type {dtype or code}: expected one of {wanted.dtypes}")
    if rows and not wanted.width:
        raise FrameRefused(f"{rows} rows of a matrix without columns")
    nbytes = matrix_nbytes(rows * wanted.width, dtype)
    # Before memory is reserved: a header may claim more than a machine has.
    received = sum(memoryview(frame).nbytes for frame in frames[1:])
    if nbytes > received:
        raise FrameRefused(f"{received} bytes where {rows} rows take {nbytes}")
    sizes = frame_sizes(nbytes)
    if [memoryview(frame).nbytes for frame in frames[1 : 1 + len(sizes)]] != sizes:
        raise FrameRefused(f"{rows} rows in {nbytes} bytes are cut into other frames than {sizes}")
    return rows, dtype, 1 + len(sizes)


def stack(
    matrices: Sequence[tuple[int, str, Sequence[Buffer]]],
    width: int,
    dtype: str,
    scratch: Scratch,
    place: int,
) -> Values:
    """Stack matrices in the given order; each is a tuple of its rows, its dtype and its frames."""
    row_bytes = width * BYTES[dtype]
    whole = Values(scratch.take(place, sum(rows for rows, _, _ in matrices) * row_bytes), dtype)
    start = 0
    for rows, source_dtype, frames in matrices:
        out = whole.data[start : start + rows * row_bytes]
        start += rows * row_bytes
        if source_dtype == dtype:
            read_into(out, frames)
        elif rows:
            decoded = decoded_values(rows * width, source_dtype, frames)
            mean_into(out, [decoded.data], decoded.dtype, 1.0, out_dtype=dtype)
    return whole


def decoded_values(numel: int, dtype: str, frames: Sequence[Buffer]) -> Values:
    """Return the values of a matrix sent in another precision than it is stacked in."""
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
