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

    `dtype` is that of the inputs, and of `out` unless `out_dtype` is another; with one input
    and a divisor of 1 this converts. Sums are computed in float32 (float64 if either is float64)
    and rounded once, to nearest even. Every NaN is written as the same quiet NaN. Equal input
    therefore gives equal bytes on any processor.

    All buffers have the same number of elements. `out` may be the very memory of an input; any
    other overlap is refused.
    """

def largest(
    data: _Bytes, dtype: Literal["float32", "float64", "bfloat16", "float16"] | str
) -> float:
    """Return the largest magnitude, 0.0 of none; infinite if one is, NaN if one is NaN."""

def one_bit_pack(out: _Bytes, gradient: _Bytes, residual: _Bytes) -> None:
    """Write one bit per value of `gradient + residual` (float32), and keep the remainder.

    With `acc = gradient + residual`, the bit is `acc >= 0` and a bit's scale is the mean of its
    `acc` (0 if there are none); `residual` becomes `acc` minus the scale of its bit, rounded
    once. A NaN makes both scales NaN, an infinity makes that of its sign infinite; then `residual`
    does not change, so that later values can be finite again.

    `out` has `8 + ceil(n / 8)` bytes, little-endian: the scale of clear bits, that of set bits, and
    the bits, that of value i in byte i / 8 as bit i % 8. Equal input gives equal bytes on any
    processor. No two of the buffers may overlap.
    """

def one_bit_pack_portable(out: _Bytes, gradient: _Bytes, residual: _Bytes) -> None:
    """Do the same as `one_bit_pack`, which uses this on a processor without AVX2."""

def one_bit_unpack(out: _Bytes, inputs: Sequence[_Bytes], divisor: float = 1.0) -> None:
    """Write the sum of the values packed in `inputs`, added strictly in order, over `divisor`.

    The bytes are those of `mean_into` for the unpacked inputs. `out` is float32 and
    overlaps no input.
    """

def one_bit_unpack_portable(out: _Bytes, inputs: Sequence[_Bytes], divisor: float = 1.0) -> None:
    """Do the same as `one_bit_unpack`, which uses this on a processor without AVX2."""

def low_rank_pack(
    factor: _Bytes,
    gradient: _Bytes,
    residual: _Bytes,
    basis: _Bytes,
    rows: int,
    rank: int,
    left: bool,
) -> None:
    """Write the product of the matrix `gradient + residual` with a basis; keep the remainder.

    All are float32. `basis` has `rank` vectors as long as a row (as a column if `left`), one after
    the other; `factor` gets as many, as long as a column (as a row if `left`). `residual` becomes
    the sum minus the result of `low_rank_unpack` on both, rounded once. Equal input gives equal
    bytes on any processor. No two of the buffers may overlap.
    """

def low_rank_unpack(out: _Bytes, u: _Bytes, v: _Bytes, rows: int, rank: int) -> None:
    """Write the sum of the outer products of `rank` vectors each, added strictly in order.

    Vectors `u` are as long as a column of `out`, `v` as long as a row, all float32.
    """

def text_net_gradients(
    sizes: tuple[int, int, int],
    widths: Sequence[int],
    weights: Sequence[_Bytes],
    batch: Sequence[_Bytes],
    gradients: Sequence[_Bytes],
    scores: Sequence[_Bytes],
) -> float:
    """Write the gradients and scores of a wide and deep net; return the mean loss of the batch.

    Args:
        sizes: Dimensions of a word, maps of a window, classes.
        widths: Words of each window.
        weights: float32: embedding, wide table, classifier and its bias, then each window and its
            bias.
        batch: int64 words and their ends, int64 features, float32 values, int64 ends of the
            features, float32 targets and dropout's mask.
        gradients: The memory for gradients, in the order of the weights; of the first two, a row
            for each word and each feature of the batch.
        scores: The memory for scores of the deep and the wide part, a row for each text.
    """

def text_batch(
    rows: Sequence[_Bytes],
    numbers: _Bytes,
    dropped: _Bytes,
    unknown: int,
    rates: tuple[float, float],
    classes: int,
    noise: _Bytes | None,
    batch: Sequence[_Bytes],
) -> int:
    """Write some rows of training data as a batch; return how many features it has.

    Args:
        rows: All rows, one after the other: int64 words and their ends, int64 features, float32
            values, int64 ends of the features, int64 classes and their ends.
        numbers: int64 numbers of the rows in the batch.
        dropped: float32, for each word the probability to become unknown.
        unknown: The number of the unknown word.
        rates: The probabilities to leave out a feature and to drop a pooled value.
        classes: The number of classes.
        noise: uint64, the state of the random generator, which advances. None: nothing is dropped.
        batch: The memory for its parts, as `text_net_gradients` takes them; features and values
            have room for all of the rows' features.
    """

def quantized_nbytes(count: int, bits: int, block: int) -> int:
    """Return the bytes that `quantize_pack` writes for `count` values: scales, then codes."""

def quantize_pack(
    out: _Bytes,
    gradient: _Bytes,
    residual: _Bytes | None,
    bits: int,
    block: int,
    seed: int | None = None,
) -> None:
    """Write `gradient + residual` (float32) in `bits` bits per value, and keep the remainder.

    With `acc = gradient + residual` and L = 127 (8 bits) or 7 (4 bits), a block's scale is its
    largest `abs(acc) / L`, cut so that `code * scale` is exact, and a code `acc / scale`, rounded
    to nearest even; with a `seed`, up or down at random. `residual` becomes `acc - code * scale`,
    exactly unless rounding was random. Without a `residual` nothing is added, and rounding errors
    are lost.

    A value that is not finite is received as such and does not change `residual`; finite values of
    such a block stay in `residual`. `native/quantize.h` has the layout. Equal input gives equal
    bytes on any processor. No two of the buffers may overlap.
    """

def quantize_pack_portable(
    out: _Bytes,
    gradient: _Bytes,
    residual: _Bytes | None,
    bits: int,
    block: int,
    seed: int | None = None,
) -> None:
    """Do the same as `quantize_pack`, which uses this on a processor without AVX2."""

def quantize_unpack(
    out: _Bytes, inputs: Sequence[_Bytes], bits: int, block: int, divisor: float = 1.0
) -> None:
    """Write the sum of the values packed in `inputs`, added strictly in order, over `divisor`.

    The bytes are those of `mean_into` for the unpacked inputs. `out` is float32 and
    overlaps no input.
    """

def quantize_unpack_portable(
    out: _Bytes, inputs: Sequence[_Bytes], bits: int, block: int, divisor: float = 1.0
) -> None:
    """Do the same as `quantize_unpack`, which uses this on a processor without AVX2."""

def bounded_nbytes(count: int, values: Literal["float32", "bfloat16", "int8", "int4"] | str) -> int:
    """Return the size that `bounded_pack` needs for `count` values: no frame is larger."""

def bounded_pack(
    out: _Bytes,
    gradient: _Bytes,
    residual: _Bytes,
    delta: float,
    values: Literal["float32", "bfloat16", "int8", "int4"] | str,
    ties: int = 0,
) -> int:
    """Write the entries of `gradient + residual` (float32) beyond `delta`, and keep the others.

    With `acc = gradient + residual`, an entry is sent if `not (abs(acc) <= delta)`, so that a
    NaN is; and of those with `abs(acc) == delta` the first `ties`. `residual` becomes `acc` for an
    entry that is not sent; +0 for one that is sent as float32; and for one sent as bfloat16 the
    rounding error (to nearest even, a finite one to a finite one), exactly. As int8 or int4,
    entries are quantised in runs of 64, and `residual` becomes the remainder, as in
    `quantize_pack`. Entries that are not finite are sent, and `residual` becomes +0.

    The frame is at the start of `out`; the result is its size in bytes. It is dense, or a bitmap
    and values, or indexes and values, whichever is smallest: `native/bounded.h` has the layout.
    Equal input gives equal bytes on any processor. No two of the buffers may overlap.
    """

def bounded_pack_portable(
    out: _Bytes,
    gradient: _Bytes,
    residual: _Bytes,
    delta: float,
    values: Literal["float32", "bfloat16", "int8", "int4"] | str,
    ties: int = 0,
) -> int:
    """Do the same as `bounded_pack`, which uses this on a processor without AVX2."""

def bounded_check(frame: _Bytes, count: int) -> None:
    """Raise ValueError with the reason unless `frame` is one of `count` values, to the last bit."""

def bounded_add(out: _Bytes, frame: _Bytes) -> None:
    """Add the values of `frame` to `out` (float32); do not change elements without a value.

    Checks as `bounded_check` does, before `out` is changed. Every NaN is written as the same quiet
    NaN.
    """

def bounded_add_portable(out: _Bytes, frame: _Bytes) -> None:
    """Do the same as `bounded_add`, which uses this on a processor without AVX2."""

def bounded_write(out: _Bytes, frame: _Bytes) -> None:
    """Do the same as `bounded_add` to an `out` of zeros."""

def bounded_write_portable(out: _Bytes, frame: _Bytes) -> None:
    """Do the same as `bounded_write`, which uses this on a processor without AVX2."""

def crc32c(data: _Bytes, seed: int = 0) -> int:
    """Return the CRC-32C (Castagnoli) of `data`, continuing the checksum `seed` (0 to 2**32 - 1).

    `crc32c(b, crc32c(a)) == crc32c(a + b)`.
    """

def crc32c_portable(data: _Bytes, seed: int = 0) -> int:
    """Do the same as `crc32c`, which uses this on a processor without the instruction."""

def segment_nbytes(learners: int, slots: int, slot_nbytes: int, weights_nbytes: int) -> int:
    """Return the bytes of a segment of this shape."""

def format_segment(
    memory: _Bytes, learners: int, slots: int, slot_nbytes: int, weights_nbytes: int
) -> None:
    """Format `memory`, `segment_nbytes` zeros, as a segment."""

class Rings:
    """A segment: weights, and a ring of slots for each learner. `memory` stays mapped."""

    def __init__(self, memory: _Bytes) -> None: ...
    version: int
    @property
    def learners(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def weights_at(self) -> int: ...
    def beat_once(self) -> None: ...
    @property
    def beat(self) -> int:
        """A number that changes as long as the server is alive."""

    @property
    def closing(self) -> bool: ...
    def close(self) -> None:
        """Announce that no more slots will be pushed."""

    def slot_at(self, learner: int, slot: int) -> int: ...
    def reserve(self, learner: int, limit_s: float) -> int | None:
        """Return the slot to fill, once one is free; None if none is within the limit."""

    def publish(self, learner: int) -> None:
        """Pass the reserved slot to the server."""

    def next(self, last: int, limit_s: float) -> tuple[int, int] | None:
        """Return a learner after `last`, in turn, and its oldest slot; None if none in time."""

    def rest(self, limit_s: float) -> None:
        """Sleep, and signal that the server is alive."""

    def release(self, learner: int) -> None:
        """Return the oldest published slot to the learner."""

    def discard(self, learner: int, pushed: int) -> None:
        """Return the first `pushed` published slots to the learner."""

    def pushed(self, learner: int) -> int: ...
    def taken(self, learner: int) -> int: ...
    def advance(self) -> int:
        """Count one more update; return the number of updates."""

    def begin_reading(self, learner: int, limit_s: float) -> bool:
        """Prevent changes of weights until `end_reading`; return False at the limit."""

    def reading(self, learner: int) -> bool: ...
    def end_reading(self, learner: int) -> None: ...
    def begin_writing(self, who: int, limit_s: float) -> bool:
        """Prevent reads and other writes until `end_writing`; return False at the limit."""

    def end_writing(self) -> None: ...
    def release_dead(self, who: int) -> None:
        """Release the locks of a process that has died."""

def board_nbytes(workers: int, tensors: int) -> int:
    """Return the bytes of a board of so many workers and tensors."""

class HostBoard:
    """The board on which workers of one host publish their progress. `memory` stays mapped.

    `memory` begins with `board_nbytes` bytes, zeros before the first publication. Worker 0
    represents the host. `native/board.h` has the protocol.
    """

    def __init__(self, memory: _Bytes, workers: int, tensors: int) -> None: ...
    def note(self, worker: int, round_: int, number: int) -> None:
        """Set the worker's number for a round, before it publishes."""

    def noted(self, worker: int, round_: int) -> int:
        """Return the number of this round or the next; older ones are overwritten."""

    def publish(self, worker: int, tensor: int, round_: int, present: bool, step: int = 0) -> None:
        """Publish that the worker's contribution to a round is in its segment, or that it has none.
        Worker 0 wakes the others."""

    def step(self, worker: int, tensor: int) -> int:
        """Return the last 15 bits of the step with which the worker last published a tensor."""

    def publish_result(self, tensor: int, round_: int, present: bool) -> None:
        """Publish that the result of a round is in its segment, or that there is none."""

    def published(self, worker: int, tensor: int, round_: int) -> bool | None:
        """Return whether the worker has a contribution; None if it has not published yet."""

    def result(self, tensor: int, round_: int) -> bool | None:
        """Return whether there is a result; None if it is not known yet."""

    def arrived(self, round_: int, wanted: Sequence[int]) -> list[int]:
        """Return those of these tensors that all workers but the first have published."""

    def bell(self, of_results: bool) -> int:
        """Return a number that every publication changes; read it before the words."""

    def sleep(self, of_results: bool, seen: int, limit_s: float) -> None:
        """Sleep until the bell differs from `seen`, or until the limit."""

def add_rows(
    out: _Bytes, numbers: _Bytes, ids: _Bytes, values: _Bytes, width: int, is_double: bool
) -> None:
    """Add rows of values to the rows of `out` that `ids` lists; record their numbers."""

class Update:
    """Updates of weights in place, from slots.

    `places` has for each gradient: the offsets of its weights, of its values in a slot and of the
    numbers of its rows; its number of values, and of values per row; its group; and True if the
    values are float64.
    """

    def __init__(
        self, rule: str, places: list[tuple[int, int, int, int, int, int, bool]], groups: int
    ) -> None: ...
    @property
    def weights_nbytes(self) -> int: ...
    @property
    def slot_nbytes(self) -> int: ...
    def apply(
        self, weights: _Bytes, slot: _Bytes, memories: Sequence[_Bytes], steps: _Bytes
    ) -> None:
        """Raise ValueError with the reason if the slot does not fit; nothing has changed then.

        The rows of the slot are all zeros afterwards.
        """
