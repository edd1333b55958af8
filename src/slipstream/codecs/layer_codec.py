"""The part common to codecs of whole layers: a gradient is two matrices with equally many rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import numpy as np

from slipstream.codecs.matrices import (
    LayerMath,
    Scratch,
    Wanted,
    frames_taken,
    matrix_nbytes,
    stack,
)
from slipstream.codecs.quantized import FEW_BITS
from slipstream.errors import ConfigError, FrameRefused
from slipstream.parts import Facts, Part, facts
from slipstream.types import Buffer, Layer, Rank, Spec, Values

LayerForm = Literal["factors", "rows"]
CompactWire = Literal["same", "bfloat16", "float32", "int8", "int4"]


class LayerCodec(Part, frozen=True):
    """A codec of a whole layer; its subclasses define which two matrices are sent.

    ``wire="same"`` and ``"float32"`` are exact; ``"bfloat16"`` halves the bytes of fp32. ``"int8"``
    and ``"int4"`` quarter and eighth them: each value is rounded up or down at random, so that the
    expected gradient is the exact one. Random numbers follow from ``seed``, the worker, the step,
    the layer and the matrix, so that a run can be repeated.
    """

    wire: CompactWire = "same"
    seed: int = 0

    form: ClassVar[LayerForm]
    splits: ClassVar[bool] = True
    early: ClassVar[bool] = False  # the first matrix may be sent in the forward pass
    counted: ClassVar[tuple[str, str]]  # names of the matrices' rows, for error messages

    def __post_init__(self) -> None:
        if self.wire not in get_args(CompactWire):
            known = ", ".join(get_args(CompactWire))
            raise ConfigError(f"wire={self.wire!r}: choose one of {known}")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"seed={self.seed!r}: choose a number from 0 to 2**32 - 1")

    @property
    def name(self) -> str:
        return f"{self.form}-{self.wire}" if self.lossy else self.form

    @property
    def lossy(self) -> bool:
        return self.wire == "bfloat16" or self.wire in FEW_BITS

    def facts(self) -> Facts:
        shorter = facts("up: shorter values") if self.wire in FEW_BITS else facts()
        return facts("up: compact form") | shorter

    def wire_dtype(self, dtype: str, place: int) -> str:
        """Return the precision in which matrix ``place`` of this dtype is sent."""
        if self.wire == "float32" and dtype in ("bfloat16", "float16"):
            return "float32"
        if self.wire in FEW_BITS and dtype != "float64":
            return self.wire
        return "bfloat16" if self.wire == "bfloat16" and dtype == "float32" else dtype

    def wire_bytes(self, spec: Spec, workers: int, rows: int = 0) -> float:
        """Return the bytes of two matrices of so many rows, without their headers of a few bytes.

        They are the weight's; the layer's bias follows from them and takes no bytes.
        """
        if len(spec.shape) != 2:
            return 0.0
        outputs, inputs = reversed(spec.shape) if spec.transposed else spec.shape
        weight = Layer(spec.layer, self.form, outputs, inputs, 0, None, spec.dtype, spec.transposed)
        return sum(
            matrix_nbytes(
                rows * wanted.width, self.wire_dtype(wanted.stacked_as or spec.dtype, place)
            )
            for place, wanted in enumerate(self.matrices(weight))
        )

    def chance(self, rank: Rank, step: int, unit: int, place: int) -> int:
        """Return the seed that rounds one matrix of one worker; independent of all other seeds."""
        sequence = np.random.SeedSequence((self.seed, rank, step, unit, place))
        return int(sequence.generate_state(1)[0])

    def matrices(self, layer: Layer) -> tuple[Wanted, Wanted]:
        """Return the required width and precision of the layer's two matrices."""
        raise NotImplementedError

    def examine(self, frames: Sequence[Buffer], layer: Layer) -> None:
        """Check a contribution.

        Raises:
            FrameRefused: The frames are not the two matrices of this layer.
        """
        first, second = self.matrices(layer)
        rows, _, used = frames_taken(frames, first)
        others, _, rest = frames_taken(frames[used:], second)
        if rows != others or used + rest != len(frames):
            received = f"{rows} {self.counted[0]} and {others} {self.counted[1]}"
            raise FrameRefused(f"{received}, in {len(frames)} frames")

    def examine_early(self, frames: Sequence[Buffer], layer: Layer) -> None:
        """Check a first matrix that was sent in the forward pass.

        Raises:
            FrameRefused: It is not this layer's, or the codec sends none early.
        """
        if not self.early:
            raise FrameRefused(f"{self.form} do not leave early: expected them after backward")
        rows, _, used = frames_taken(frames, self.matrices(layer)[0])
        if not rows or used != len(frames):
            raise FrameRefused(f"{rows} rows of inputs in {len(frames)} frames: expected 1 or more")

    def combine(
        self,
        contributions: Sequence[Sequence[Buffer]],
        layer: Layer,
        math: LayerMath,
        scratch: Scratch,
        *,
        divisor: float,
    ) -> None:
        """Stack the rows of all contributions in the given order, and compute the layer's gradient.

        Args:
            contributions: Frames that have passed ``examine``.
            math: Computes and stores the gradient: torch at workers, numpy at servers.
            scratch: Memory for the stacks.
            divisor: The number by which the sum is divided.
        """
        first, second = self.matrices(layer)
        both: tuple[list[tuple[int, str, Sequence[Buffer]]], ...] = ([], [])
        for frames in contributions:
            for wanted, matrices in zip((first, second), both, strict=True):
                rows, dtype, used = frames_taken(frames, wanted)
                matrices.append((rows, dtype, frames[1:used]))
                frames = frames[used:]
        stacks = [
            stack(matrices, wanted.width, wanted.stacked_as or layer.dtype, scratch, place)
            for place, (wanted, matrices) in enumerate(zip((first, second), both, strict=True))
        ]
        rows = sum(rows for rows, _, _ in both[0])
        self.accumulate(math, layer, stacks[0], stacks[1], rows, 1.0 / divisor)

    def accumulate(
        self, math: LayerMath, layer: Layer, first: Values, second: Values, rows: int, share: float
    ) -> None:
        """Add ``share`` times the gradient of the two stacks of ``rows`` rows."""
        raise NotImplementedError
