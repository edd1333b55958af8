"""One bit a value, and what that loses is made good the next time (CNTK's 1-bit SGD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from slipstream._native import one_bit_pack, one_bit_unpack
from slipstream.errors import FrameRefused, IncompatibleRoute
from slipstream.types import HERE, Buffer, Hop, Spec, Values

SCALES_BYTES = 8
Residual = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class OneBit:
    """The sign of each value, and the mean of the values of either sign, for every segment.

    With a the values plus the residual r of the last time:

        q(aᵢ) = mean of all aⱼ ≥ 0 where aᵢ ≥ 0, mean of all aⱼ < 0 elsewhere;  rᵢ ← aᵢ − q(aᵢ)

    A NaN or an infinity makes the means so, and does not enter the residual.
    """

    splits: ClassVar[bool] = True
    frames: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return "one-bit"

    @staticmethod
    def nbytes(numel: int) -> int:
        """What ``numel`` values take on the wire: two means, and the bits."""
        return SCALES_BYTES + -(-numel // 8)

    def check(self, spec: Spec) -> None:
        if spec.dtype != "float32":
            raise IncompatibleRoute(
                f"{spec.name!r} is {spec.dtype}; one bit a value is for float32, in which the "
                "residual is kept: route it to Dense()"
            )

    def init(self, numel: int, dtype: str) -> Residual:
        """The residual: nothing is owed at the start."""
        return np.zeros(numel, dtype=np.float32)

    def encode(self, values: Values, memory: Residual, hop: Hop = HERE) -> tuple[Buffer, ...]:
        out = np.empty(self.nbytes(values.numel), dtype=np.uint8)
        one_bit_pack(out, values.data, memory)
        return (out,)

    def examine(self, frames: Sequence[Buffer], numel: int, dtype: str) -> None:
        expected = self.nbytes(numel)
        actual = memoryview(frames[0]).nbytes
        if actual != expected:
            raise FrameRefused(f"{actual} bytes where {numel} values take {expected}")

    def combine(
        self, contributions: Sequence[Sequence[Buffer]], out: Values, *, divisor: float
    ) -> None:
        one_bit_unpack(out.data, [frames[0] for frames in contributions], divisor)

    def decode_into(self, frames: Sequence[Buffer], out: Values) -> None:
        one_bit_unpack(out.data, [frames[0]])
