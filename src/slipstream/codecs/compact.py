"""A layer's gradient as two matrices of few rows, in their own precision or in bf16.

Factors: X (rows × inputs) and dY (rows × outputs). Rows of a table: ids (rows × 1) and values
(rows × width). The matrices themselves are torch's business; here is what they look like on a wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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
    """``own`` is exact; ``bfloat16`` halves the bytes of fp32 and rounds."""

    wire: Literal["own", "bfloat16"] = "own"

    def __post_init__(self) -> None:
        if self.wire not in ("own", "bfloat16"):
            raise ConfigError(f"wire={self.wire!r}: choose 'own' or 'bfloat16'")

    def dtype(self, dtype: str) -> str:
        """What a matrix of this precision travels as."""
        return "bfloat16" if self.wire == "bfloat16" and dtype == "float32" else dtype

    def item_bytes(self, shape: Shape) -> int:
        return 2 if self.wire == "bfloat16" and shape.item_bytes == 4 else shape.item_bytes

    @staticmethod
    def rows_a_frame(row_bytes: int) -> int:
        return max(1, LARGEST_CHUNK_BYTES // max(1, row_bytes))

    @classmethod
    def frames_for(cls, rows: int, row_bytes: int) -> int:
        return -(-rows // cls.rows_a_frame(row_bytes))

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
        ids = shape.form == "rows"
        widths = (1 if ids else shape.inputs, shape.inputs if ids else shape.outputs)
        expected: list[int] = []
        for place, (width, dtype) in enumerate(zip(widths, dtypes, strict=True)):
            size = ID_BYTES if ids and place == 0 and dtype == ID_DTYPE else ITEM_BYTES.get(dtype)
            if size is None or (ids and place == 0 and dtype != ID_DTYPE):
                raise FrameRefused(f"a matrix of {dtype!r}")
            each = self.rows_a_frame(width * size)
            if len(frames) < -(-rows // each):
                raise FrameRefused(f"{len(frames)} frames for {rows} rows")
            expected += [min(each, rows - start) * width * size for start in range(0, rows, each)]
        actual = [memoryview(frame).nbytes for frame in frames]
        if actual != expected:
            raise FrameRefused(f"{sum(actual)} bytes where {rows} rows take {sum(expected)}")
