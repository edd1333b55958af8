"""A layer's gradient as two matrices of few rows, in their own precision or in bf16.

Factors: X (rows × inputs) and dY (rows × outputs). Rows of a table: ids (rows × 1) and values
(rows × width). The matrices themselves are torch's business; here is what they look like on a wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from slipstream.errors import ConfigError, FrameRefused
from slipstream.types import ITEM_BYTES, LARGEST_CHUNK_BYTES, Buffer

ID_DTYPE, ID_BYTES = "int64", 8


class Shape(Protocol):
    """What it takes of a layer."""

    @property
    def form(self) -> Literal["factors", "rows"]: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def item_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class CompactWire:
    """``own`` and ``float32`` are exact; ``bfloat16`` halves the bytes of fp32 and rounds."""

    wire: Literal["own", "bfloat16", "float32"] = "own"

    def __post_init__(self) -> None:
        if self.wire not in ("own", "bfloat16", "float32"):
            raise ConfigError(f"wire={self.wire!r}: choose 'own' or 'bfloat16'")

    def dtype(self, dtype: str) -> str:
        """What a matrix of this precision travels as."""
        if self.wire == "float32" and dtype in ("bfloat16", "float16"):
            return "float32"
        return "bfloat16" if self.wire == "bfloat16" and dtype == "float32" else dtype

    def item_bytes(self, shape: Shape) -> int:
        return 2 if self.wire == "bfloat16" and shape.item_bytes == 4 else shape.item_bytes

    @staticmethod
    def sizes(nbytes: int) -> list[int]:
        """Of the frames that a matrix of so many bytes takes; none if it is empty."""
        whole, rest = divmod(nbytes, LARGEST_CHUNK_BYTES)
        return [LARGEST_CHUNK_BYTES] * whole + [rest] * bool(rest)

    @classmethod
    def frames_for(cls, rows: int, row_bytes: int) -> int:
        return len(cls.sizes(rows * row_bytes))

    def examine(
        self,
        shape: Shape,
        present: bool,
        rows: int,
        dtypes: tuple[str, str],
        frames: Sequence[Buffer],
    ) -> None:
        """Raise FrameRefused unless the frames are two whole matrices of this layer."""
        if not present:
            if rows or frames:
                raise FrameRefused("rows of a layer that was not used")
            return
        row_bytes = self._row_bytes(shape, dtypes)
        actual = [memoryview(frame).nbytes for frame in frames]
        if (rows and not any(row_bytes)) or rows * sum(row_bytes) != sum(actual):
            raise FrameRefused(
                f"{sum(actual)} bytes where {rows} rows take {rows * sum(row_bytes)}"
            )
        expected = [self.sizes(rows * each) for each in row_bytes]
        if actual != [*expected[0], *expected[1]]:
            raise FrameRefused(f"{rows} rows cut into {len(actual)} frames in another way")
        if shape.form == "rows":
            self._examine_ids(shape, frames[: len(expected[0])])

    def examine_first(self, shape: Shape, rows: int, dtype: str, frames: Sequence[Buffer]) -> None:
        """Raise FrameRefused unless the frames are the inputs of a fully connected layer."""
        if shape.form != "factors" or dtype not in ITEM_BYTES or not rows:
            raise FrameRefused(f"{rows} rows of {dtype!r} as inputs of a layer")
        actual = [memoryview(frame).nbytes for frame in frames]
        told = rows * shape.inputs * ITEM_BYTES[dtype]
        if sum(actual) != told or actual != self.sizes(told):
            raise FrameRefused(f"{sum(actual)} bytes where {rows} rows of {dtype} inputs were told")

    @staticmethod
    def _row_bytes(shape: Shape, dtypes: tuple[str, str]) -> tuple[int, int]:
        """Of a row of each matrix."""
        first, second = dtypes
        for dtype in (second,) if shape.form == "rows" else dtypes:
            if dtype not in ITEM_BYTES:
                raise FrameRefused(f"a matrix of {dtype!r}")
        if shape.form == "factors":
            return shape.inputs * ITEM_BYTES[first], shape.outputs * ITEM_BYTES[second]
        if first != ID_DTYPE:
            raise FrameRefused(f"row ids of {first!r}")
        return ID_BYTES, shape.inputs * ITEM_BYTES[second]

    @staticmethod
    def _examine_ids(shape: Shape, frames: Sequence[Buffer]) -> None:
        for frame in frames:
            ids = np.frombuffer(frame, np.int64)
            if ids.min() < 0 or ids.max() >= shape.outputs:
                raise FrameRefused(f"ids of rows that a table of {shape.outputs} does not have")
