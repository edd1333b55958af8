"""Eight or four bits per value, one scale per block, and error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import numpy as np

from slipstream._native import quantize_pack, quantize_unpack, quantized_nbytes
from slipstream.codecs.protocol import Form, check_nbytes
from slipstream.codecs.residual import Residual, obstacle_to_residual
from slipstream.errors import ConfigError
from slipstream.parts import Facts, Part, facts
from slipstream.types import HERE, Buffer, EncodeContext, Spec, Values

Bits = Literal[8, 4]
RoundingMode = Literal["nearest", "stochastic"]
BLOCKS = range(32, 4096 + 1, 32)  # the sizes that native/quantize.h accepts
SCALE_BYTES = 4


class Quantized(Part, frozen=True):
    """Send each value as a whole number of steps; L steps are its block's largest magnitude.

    With a the values plus the residual r of the last step, and L = 127 (8 bits) or 7 (4 bits):

        s = max |aᵢ| / L in the block;  qᵢ = round(aᵢ / s);  rᵢ ← aᵢ − s qᵢ

    s has a short mantissa, so that s qᵢ is exact; with ``nearest``, rᵢ is exact, too. The receiver
    adds s qᵢ in float32. The rounding error stays in r and is sent later. A NaN or an infinity
    arrives as such and does not enter r; the finite values of its block wait in r.

    Args:
        bits: 8 or 4.
        block: The number of values that share a scale of 4 bytes: a multiple of 32, at most 4096.
        rounding: ``nearest``, or ``stochastic``: up or down at random, so that the expected value
            is aᵢ. It depends on ``seed``, the step and the values only: a run can be repeated.
        seed: The seed of stochastic rounding.

        Raises:
        ConfigError: An argument is out of range.

    >>> Quantized(bits=4, block=64).name
    'int4'

    References:
        Alistarh, Grubic, Li, Tomioka and Vojnovic: QSGD: Communication-Efficient SGD via Gradient
        Quantization and Encoding (2017). It has no error feedback; see ``one_bit`` for that.
    """

    bits: Bits = 8
    block: int = 256
    rounding: RoundingMode = "nearest"
    seed: int = 0

    form: ClassVar[Form] = "dense"
    lossy: ClassVar[bool] = True
    splits: ClassVar[bool] = True
    frames: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.bits not in get_args(Bits) or type(self.bits) is not int:
            raise ConfigError(f"Quantized(bits={self.bits!r}): choose 8 or 4")
        if type(self.block) is not int or self.block not in BLOCKS:
            raise ConfigError(
                f"Quantized(block={self.block!r}): choose a multiple of {BLOCKS.step}, from "
                f"{BLOCKS[0]} to {BLOCKS[-1]}"
            )
        if self.rounding not in get_args(RoundingMode):
            known = " or ".join(map(repr, get_args(RoundingMode)))
            raise ConfigError(f"Quantized(rounding={self.rounding!r}): choose {known}")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"Quantized(seed={self.seed!r}): choose a number from 0 to 2**32 - 1")

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def nbytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` values on the wire: the scales, and the codes."""
        return quantized_nbytes(numel, self.bits, self.block)

    def facts(self) -> Facts:
        return facts("up: dense", "up: error feedback", "up: each value rounded")

    def obstacle(self, spec: Spec) -> str:
        return obstacle_to_residual(spec)

    def wire_bytes(self, spec: Spec, workers: int, rows: int = 0) -> float:
        return self.nbytes(spec.numel)

    def init(self, numel: int, dtype: str) -> Residual:
        return Residual.zeros(numel)

    def encode(
        self, values: Values, residual: Residual, ctx: EncodeContext = HERE
    ) -> tuple[Buffer, ...]:
        out = np.empty(self.nbytes(values.numel), dtype=np.uint8)
        # The factor spreads steps over all seeds: runs with neighbouring seeds do not soon share
        # random numbers.
        step_seed = (self.seed + ctx.clock * 0x9E3779B1) % (1 << 32)
        seed = step_seed if self.rounding == "stochastic" else None
        quantize_pack(out, values.data, residual.values, self.bits, self.block, seed)
        return (out,)

    def examine(self, frames: Sequence[Buffer], numel: int, dtype: str) -> None:
        check_nbytes(frames[0], numel, self.nbytes(numel))

    def combine(
        self, contributions: Sequence[Sequence[Buffer]], out: Values, *, divisor: float
    ) -> None:
        inputs = [frames[0] for frames in contributions]
        quantize_unpack(out.data, inputs, self.bits, self.block, divisor)

    def decode_into(self, frames: Sequence[Buffer], out: Values) -> None:
        self.combine([frames], out, divisor=1.0)


# The meaning of "int8" and "int4" wherever a wire format is chosen. Blocks of 4 bits are smaller,
# since a large value rounds more of its neighbours to zero.
FEW_BITS = {"int8": Quantized(8, block=256), "int4": Quantized(4, block=128)}
