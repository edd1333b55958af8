"""Kernels over raw buffers. All of them release the GIL.

Arguments are C-contiguous buffers of any item type and alignment; only their bytes count.
A buffer of the wrong size or layout is a `ValueError`, an object without the buffer protocol a
`TypeError`.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from typing_extensions import Buffer

# Before Python 3.12, numpy's own types do not say that an array is a buffer.
_Bytes: TypeAlias = Buffer | np.ndarray[Any, Any]

def mean_into(
    out: _Bytes,
    inputs: Sequence[_Bytes],
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | str,
    divisor: float,
    out_dtype: Literal["float32", "float64", "bfloat16", "float16"] | str | None = None,
) -> None:
    """Write `((inputs[0] + inputs[1]) + inputs[2] + ...) / divisor`, added strictly in order.

    `dtype` is that of the inputs, and of `out` unless `out_dtype` says otherwise; with one input
    and a divisor of 1 this converts. Sums are held in float32 (float64 where either is float64)
    and rounded once, to nearest even. Every NaN is written as the same quiet NaN. Equal input
    therefore gives equal bytes on any processor.

    All buffers have the same number of elements. `out` may be the very memory of an input; any
    other overlap is refused.
    """

def one_bit_pack(out: _Bytes, gradient: _Bytes, residual: _Bytes) -> None:
    """Write one bit a value of `gradient + residual` (float32), and keep what that leaves.

    With `acc = gradient + residual`, the bit is `acc >= 0` and a bit's scale is the mean of its
    `acc` (0 where there are none); `residual` becomes `acc` minus the scale of its bit, rounded
    once. A NaN makes both scales NaN, an infinity that of its sign infinite; then `residual` stays
    as it was, so that what follows can be finite again.

    `out` has `8 + ceil(n / 8)` bytes, little-endian: the scale of clear bits, that of set bits, and
    the bits, that of value i in byte i / 8 as bit i % 8. Equal input gives equal bytes on any
    processor. No two of the buffers may overlap.
    """

def one_bit_pack_portable(out: _Bytes, gradient: _Bytes, residual: _Bytes) -> None:
    """What `one_bit_pack` falls back to on a processor without AVX2: the same bytes."""

def one_bit_unpack(out: _Bytes, inputs: Sequence[_Bytes], divisor: float = 1.0) -> None:
    """Write the sum of the values packed in `inputs`, added strictly in order, over `divisor`.

    The bytes are those that `mean_into` gives for the inputs unpacked. `out` is float32 and
    overlaps no input.
    """

def one_bit_unpack_portable(out: _Bytes, inputs: Sequence[_Bytes], divisor: float = 1.0) -> None:
    """What `one_bit_unpack` falls back to on a processor without AVX2: the same bytes."""

def crc32c(data: _Bytes, seed: int = 0) -> int:
    """CRC-32C (Castagnoli) of `data`, continuing the checksum `seed` (0 to 2**32 - 1).

    `crc32c(b, crc32c(a)) == crc32c(a + b)`.
    """

def crc32c_portable(data: _Bytes, seed: int = 0) -> int:
    """What `crc32c` falls back to on a processor without the instruction: the same values."""
