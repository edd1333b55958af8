"""The rows codec: a table's gradient as the ids and values of the rows that were used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from slipstream.codecs.layer_codec import LayerCodec, LayerForm
from slipstream.codecs.matrices import LayerMath, Wanted, frames_taken
from slipstream.errors import FrameRefused
from slipstream.types import Buffer, Layer, Spec, Values

IDS = Wanted(1, ("int64",), stacked_as="int64")


class Rows(LayerCodec, frozen=True):
    """Send the ids (rows × 1, int64) and values (rows × width) of an embedding's used rows.

    Args:
        wire: The format of the values: "same" and "float32" are exact; "bfloat16" halves the bytes
            of fp32; "int8" and "int4" quarter and eighth them, and round at random.
        seed: The seed of random rounding.

    Raises:
        ConfigError: The wire format is unknown, or the seed is not a number of 32 bits.

    >>> Rows().obstacle(Spec("words.weight", (1000, 64), "float32", 0, layer="words", form="rows"))
    ''
    """

    form: ClassVar[LayerForm] = "rows"
    counted: ClassVar[tuple[str, str]] = ("ids", "rows")

    def obstacle(self, spec: Spec) -> str:
        if spec.form == "rows":
            return ""
        return spec.obstacle or "it is no embedding's: route it to Dense()"

    def wire_dtype(self, dtype: str, place: int) -> str:
        return dtype if place == 0 else super().wire_dtype(dtype, place)

    def matrices(self, layer: Layer) -> tuple[Wanted, Wanted]:
        return IDS, Wanted(layer.inputs)

    def examine(self, frames: Sequence[Buffer], layer: Layer) -> None:
        """Check a contribution, and that the table has rows with these ids."""
        super().examine(frames, layer)
        _, _, used = frames_taken(frames, IDS)
        for frame in frames[1:used]:
            ids = np.frombuffer(frame, np.int64)
            if ids.min() < 0 or ids.max() >= layer.outputs:
                raise FrameRefused(f"ids outside of a table of {layer.outputs} rows")

    def accumulate(
        self, math: LayerMath, layer: Layer, first: Values, second: Values, rows: int, share: float
    ) -> None:
        """Add every row at its id, in the order of the stack."""
        math.add_rows(layer, first, second, rows, share)
