"""The dense codec: every value is sent, in the tensor's own precision or a shorter one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import numpy as np

from slipstream._native import mean_into
from slipstream.codecs.protocol import Form, check_nbytes
from slipstream.errors import ConfigError
from slipstream.parts import Facts, Part, facts
from slipstream.types import HERE, ITEM_BYTES, Buffer, EncodeContext, Spec, Values

Wire = Literal["same", "float32", "bfloat16", "float16"]


class Dense(Part, frozen=True):
    """Send every value.

    Args:
        wire: "same" is exact; "bfloat16" and "float16" halve the bytes of fp32 and round. A tensor
            whose own format is no wider keeps its own format.

    Raises:
        ConfigError: The wire format is unknown.

    >>> Dense("bfloat16").wire_dtype("float32"), Dense("float32").wire_dtype("float16")
    ('bfloat16', 'float16')
    """

    wire: Wire = "same"

    form: ClassVar[Form] = "dense"
    splits: ClassVar[bool] = True
    frames: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.wire not in get_args(Wire):
            raise ConfigError(f"wire={self.wire!r}: choose one of {', '.join(get_args(Wire))}")

    @property
    def name(self) -> str:
        return "dense" if self.wire == "same" else f"dense-{self.wire}"

    def wire_dtype(self, dtype: str) -> str:
        shorter = self.wire != "same" and ITEM_BYTES[self.wire] < ITEM_BYTES[dtype]
        return self.wire if shorter else dtype

    def facts(self) -> Facts:
        return facts("up: dense")

    @property
    def lossy(self) -> bool:
        return self.wire != "same"  # float32 is shorter than float64

    def obstacle(self, spec: Spec) -> str:
        if spec.dtype in ITEM_BYTES:
            return ""
        return (
            f"it is {spec.dtype}; slipstream exchanges {', '.join(ITEM_BYTES)}: convert it, or "
            "freeze it with requires_grad_(False)"
        )

    def wire_bytes(self, spec: Spec, workers: int, rows: int = 0) -> float:
        return spec.numel * ITEM_BYTES[self.wire_dtype(spec.dtype)]

    def init(self, numel: int, dtype: str) -> None:
        """Return None, since every value is sent and nothing is kept."""

    def encode(
        self, values: Values, residual: None = None, ctx: EncodeContext = HERE
    ) -> tuple[Buffer, ...]:
        wire = self.wire_dtype(values.dtype)
        if wire == values.dtype:
            return (values.data,)
        out = Values.empty(values.numel, wire)
        mean_into(out.data, [values.data], values.dtype, 1.0, out_dtype=wire)
        return (out.data,)

    def examine(self, frames: Sequence[Buffer], numel: int, dtype: str) -> None:
        check_nbytes(frames[0], numel, numel * ITEM_BYTES[self.wire_dtype(dtype)])

    def combine(
        self, contributions: Sequence[Sequence[Buffer]], out: Values, *, divisor: float
    ) -> None:
        wire = self.wire_dtype(out.dtype)
        inputs = [frames[0] for frames in contributions]
        mean_into(out.data, inputs, wire, divisor, out_dtype=out.dtype)

    def decode_into(self, frames: Sequence[Buffer], out: Values) -> None:
        if self.wire_dtype(out.dtype) == out.dtype:
            out.data[:] = np.frombuffer(frames[0], dtype=np.uint8)
        else:
            self.combine([frames], out, divisor=1.0)
