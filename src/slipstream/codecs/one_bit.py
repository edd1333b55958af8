"""One bit per value, with error feedback (CNTK's 1-bit SGD)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from slipstream._native import one_bit_pack, one_bit_unpack
from slipstream.codecs.protocol import Form, check_nbytes
from slipstream.codecs.residual import Residual, obstacle_to_residual
from slipstream.parts import Facts, Part, facts
from slipstream.types import HERE, Buffer, EncodeContext, Spec, Values

SCALES_BYTES = 8


class OneBit(Part, frozen=True):
    """Send the sign of each value, and for every segment the mean of the values of either sign.

    With a the values plus the residual r of the last step:

        q(aᵢ) = mean of all aⱼ ≥ 0 where aᵢ ≥ 0, mean of all aⱼ < 0 elsewhere;  rᵢ ← aᵢ − q(aᵢ)

    A NaN or an infinity makes the means non-finite, and does not enter the residual.

    >>> codec, gradient = OneBit(), np.float32([4, 2, -1])
    >>> residual = codec.init(3, "float32")
    >>> frames = codec.encode(Values(gradient.view(np.uint8), "float32"), residual)
    >>> residual.values.tolist()  # what was sent is 3, 3, -1
    [1.0, -1.0, 0.0]

    References:
        Seide, Fu, Droppo, Li and Yu: 1-bit Stochastic Gradient Descent and its Application to
        Data-parallel Distributed Training of Speech DNNs (2014).
    """

    form: ClassVar[Form] = "dense"
    lossy: ClassVar[bool] = True
    splits: ClassVar[bool] = True
    frames: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return "one-bit"

    @staticmethod
    def nbytes(numel: int) -> int:
        """Return the bytes of ``numel`` values on the wire: two means, and the bits."""
        return SCALES_BYTES + -(-numel // 8)

    def facts(self) -> Facts:
        return facts("up: dense", "up: error feedback")

    def obstacle(self, spec: Spec) -> str:
        return obstacle_to_residual(spec)

    def wire_bytes(self, spec: Spec, workers: int, rows: int = 0) -> float:
        return self.nbytes(spec.numel)

    def init(self, numel: int, dtype: str) -> Residual:
        return Residual.zeros(numel, separable=False)

    def encode(
        self, values: Values, residual: Residual, ctx: EncodeContext = HERE
    ) -> tuple[Buffer, ...]:
        out = np.empty(self.nbytes(values.numel), dtype=np.uint8)
        one_bit_pack(out, values.data, residual.values)
        return (out,)

    def examine(self, frames: Sequence[Buffer], numel: int, dtype: str) -> None:
        check_nbytes(frames[0], numel, self.nbytes(numel))

    def combine(
        self, contributions: Sequence[Sequence[Buffer]], out: Values, *, divisor: float
    ) -> None:
        one_bit_unpack(out.data, [frames[0] for frames in contributions], divisor)

    def decode_into(self, frames: Sequence[Buffer], out: Values) -> None:
        one_bit_unpack(out.data, [frames[0]])
