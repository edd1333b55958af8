"""Low-rank codec: a matrix as its product with a few vectors that all workers know (PowerSGD)."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from slipstream._native import largest, low_rank_pack, low_rank_unpack, mean_into
from slipstream.codecs.orthonormal import drawn, orthonormal
from slipstream.codecs.protocol import Form
from slipstream.codecs.residual import Floats, Residual, obstacle_to_residual
from slipstream.codecs.shared_codec import Shape, SharedCodec
from slipstream.errors import ConfigError, FrameRefused, RuntimeFault
from slipstream.parts import Facts, facts
from slipstream.types import HERE, LARGEST_CHUNK_BYTES, Buffer, EncodeContext, Spec, Values

Side = Literal[0, 1]  # the side from which the basis multiplies the matrix: right, left

HEADER = struct.Struct("<II")  # the side, and the checksum of the basis
LARGEST_VALUE = 1e30  # of a gradient: its products, however many are added, are finite


class LowRank(SharedCodec, frozen=True):
    """Send a tensor as a matrix of low rank: a × r or b × r values instead of a × b.

    The matrix is the tensor with all dimensions but the first flattened. With A the values plus the
    residual R of the last round, and Q the b × r orthonormal basis that all workers have:

        P = A Q is sent;  R ← A − P Qᵀ;  the result is mean(P) Qᵀ

    In the next round the other side is multiplied: Aᵀ P̂ is sent, where P̂ = orth(mean(P)). So
    every round is half of a power iteration that starts where the last one ended, and one exchange
    a step suffices. What the basis misses stays in R and is sent later. If ``down`` is the same
    ``LowRank``, the result sent down is mean(P) and nothing else.

    The first basis follows from ``seed``, and so do its directions where all gradients were zero.
    If a gradient has a NaN, an infinity or a value above 1e30, NaN is sent and R does not change;
    the basis starts anew after it.

    Args:
        rank: r, 1 or more. (a + b) r must be less than a b; else the tensor is refused.
        seed: The seed of the first basis.

    Raises:
        ConfigError: The rank or the seed is out of range.

    >>> LowRank(rank=2).obstacle(Spec("fc.weight", (64, 32), "float32", 0))
    ''

    References:
        Vogels, Karimireddy and Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization (2019).
    """

    rank: int = 4
    seed: int = 0

    frames: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ConfigError(f"LowRank(rank={self.rank!r}): give a whole number, 1 or more")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"LowRank(seed={self.seed!r}): choose a number from 0 to 2**32 - 1")

    @property
    def name(self) -> str:
        return f"rank-{self.rank}"

    def facts(self) -> Facts:
        return facts("up: dense", "up: error feedback", "up: agreed basis")

    def obstacle(self, spec: Spec) -> str:
        if trouble := obstacle_to_residual(spec):
            return trouble
        if len(spec.shape) < 2:
            return "it has one dimension, and no rank: route it to Dense()"
        rows, columns = matrix_shape(spec.shape)
        most = min((rows * columns - 1) // max(1, rows + columns), min(rows, columns))
        fits_frame = (LARGEST_CHUNK_BYTES - HEADER.size) // (4 * max(1, rows, columns))
        most = max(0, min(most, fits_frame))
        if self.rank <= most:
            return ""
        if self.rank > min(rows, columns):
            why = f"rank={self.rank} is more than its {rows} x {columns} matrix has"
        elif self.rank > fits_frame:
            why = f"its factor of rank={self.rank} has more bytes than a message may have"
        else:
            why = f"with rank={self.rank} it takes no fewer bytes than {rows} x {columns} values"
        smaller = f"choose rank={most} or less, or " if most else ""
        return f"{why}: {smaller}route it to Dense()"

    def nbytes(self, shape: Shape, side: Side) -> int:
        """Return the bytes of a tensor on the wire in a round that multiplies this side."""
        return HEADER.size + 4 * self.rank * matrix_shape(shape)[side]

    def wire_bytes(self, spec: Spec, workers: int, rows: int = 0) -> float:
        """Return the mean bytes of both sides, which take turns."""
        return (self.nbytes(spec.shape, 0) + self.nbytes(spec.shape, 1)) / 2

    def agree(self, shape: Shape, *, ahead: int = 1) -> Bases:
        return Bases(self, shape, ahead)

    def examine(self, frame: Buffer, shape: Shape) -> None:
        view = memoryview(frame)
        if view.nbytes < HEADER.size:
            raise FrameRefused(f"{view.nbytes} bytes are no factor of rank {self.rank}")
        side, _ = HEADER.unpack_from(frame)
        if side not in (0, 1) or view.nbytes != self.nbytes(shape, side):
            raise FrameRefused(
                f"{view.nbytes} bytes, side {side}, where a factor of {shape} takes "
                f"{self.nbytes(shape, 0)} or {self.nbytes(shape, 1)}"
            )


class Bases:
    """The bases of one tensor, by round; implements ``Agreement``.

    A basis follows only from the number of its round and from the merged contributions of the
    round ``ahead`` earlier, so a member that missed other rounds computes the same basis.
    """

    def __init__(self, codec: LowRank, shape: Shape, ahead: int) -> None:
        self._codec, self._shape, self._ahead = codec, matrix_shape(shape), ahead
        self._projections: dict[int, Projection] = {}

    def at(self, round_: int) -> Projection:
        if round_ not in self._projections:
            if round_ >= self._ahead:
                raise RuntimeFault(
                    f"the basis of round {round_} is unknown: round {round_ - self._ahead} was not "
                    "learned"
                )
            self._projections[round_] = self._projection(round_, None)
        return self._projections[round_]

    def learn(self, round_: int, merged: Buffer | None) -> None:
        self._projections[round_ + self._ahead] = self._projection(round_ + self._ahead, merged)
        for past in [known for known in self._projections if known <= round_]:
            del self._projections[past]

    def _projection(self, round_: int, merged: Buffer | None) -> Projection:
        """Return a round's basis: of the merged factor if it is finite, else of the seed."""
        side: Side = 1 if round_ // self._ahead % 2 else 0
        length, rank = self._shape[1 - side], self._codec.rank
        spare = drawn((self._codec.seed, round_), length)
        vectors = np.zeros((rank, length))
        if merged is not None:
            factor = np.frombuffer(merged, np.float32, offset=HEADER.size)
            if np.isfinite(factor).all():
                vectors = factor.reshape(rank, length).astype(np.float64)
        return Projection(self._codec, self._shape, side, orthonormal(vectors, spare))


class Projection:
    """``LowRank`` with the basis of one round; implements ``RoundCodec`` for one tensor.

    Args:
        codec: The recipe.
        shape: The tensor as a matrix: rows and columns.
        side: The side from which the basis multiplies the matrix.
        basis: The orthonormal vectors, one after the other.
    """

    form: ClassVar[Form] = "dense"
    lossy: ClassVar[bool] = True
    splits: ClassVar[bool] = False
    frames: ClassVar[int] = 1

    def __init__(self, codec: LowRank, shape: tuple[int, int], side: Side, basis: Floats) -> None:
        self._codec, self._shape, self._side, self._basis = codec, shape, side, basis
        self._header = HEADER.pack(side, zlib.crc32(basis))
        self.name, self.facts, self.obstacle = codec.name, codec.facts, codec.obstacle
        self.init, self.wire_bytes = codec.init, codec.wire_bytes

    def encode(
        self, values: Values, residual: Residual, ctx: EncodeContext = HERE
    ) -> tuple[Buffer, ...]:
        frame = self._frame()
        factor = frame[HEADER.size :]
        if not largest(values.data, "float32") <= LARGEST_VALUE:
            factor.view(np.float32)[:] = np.nan
            return (frame,)
        rows, rank, from_left = self._shape[0], self._codec.rank, self._side == 1
        low_rank_pack(factor, values.data, residual.values, self._basis, rows, rank, from_left)
        return (frame,)

    def examine(self, frames: Sequence[Buffer], numel: int, dtype: str) -> None:
        self._codec.examine(frames[0], self._shape)

    def merge(self, contributions: Sequence[Sequence[Buffer]], *, divisor: float) -> Buffer:
        for (frame,) in contributions:
            self._check_basis(frame)
        out = self._frame()
        factors = [memoryview(frame)[HEADER.size :] for (frame,) in contributions]
        mean_into(out[HEADER.size :], factors, "float32", divisor, out_dtype="float32")
        return out

    def combine(
        self, contributions: Sequence[Sequence[Buffer]], out: Values, *, divisor: float
    ) -> None:
        self.decode_into((self.merge(contributions, divisor=divisor),), out)

    def decode_into(self, frames: Sequence[Buffer], out: Values) -> None:
        self._check_basis(frames[0])
        factor = memoryview(frames[0])[HEADER.size :]
        u, v = (self._basis, factor) if self._side else (factor, self._basis)
        low_rank_unpack(out.data, u, v, self._shape[0], self._codec.rank)

    def _check_basis(self, frame: Buffer) -> None:
        if bytes(memoryview(frame)[: HEADER.size]) != self._header:
            raise RuntimeFault(
                "a gradient was multiplied with another basis than this member's, so it cannot be "
                "read: this is an error in slipstream; please report it"
            )

    def _frame(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a frame with the header and room for a factor."""
        frame = np.empty(self._codec.nbytes(self._shape, self._side), np.uint8)
        frame[: HEADER.size] = np.frombuffer(self._header, np.uint8)
        return frame


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return the first dimension, and the product of all others."""
    return shape[0], math.prod(shape[1:])
