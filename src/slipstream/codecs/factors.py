"""A fully connected layer's gradient as two matrices of few rows (sufficient factors).

The weight's gradient is dYᵀX and the bias's the sum of dY's rows. So X (rows × inputs) and dY
(rows × outputs) carry the same information in fewer numbers if a batch has few rows.

References:
    Xie, Kim, Zhou, Ho, Kumar, Yu and Xing: Distributed Machine Learning via Sufficient Factor
    Broadcasting (2015).
"""

from __future__ import annotations

from typing import ClassVar

from slipstream.codecs.layer_codec import LayerCodec, LayerForm
from slipstream.codecs.matrices import LayerMath, Wanted
from slipstream.types import Layer, Spec, Values


class Factors(LayerCodec, frozen=True):
    """Send X and dY of a fully connected layer; X is known, and may be sent, in the forward pass.

    Args:
        wire: "same" and "float32" are exact; "bfloat16" halves the bytes of fp32 and rounds; "int8"
            and "int4" quarter and eighth them, and round at random, so that the expected gradient
            is the exact one.
        seed: The seed of random rounding.

    Raises:
        ConfigError: The wire format is unknown, or the seed is not a number of 32 bits.

    >>> Factors("bfloat16").name
    'factors-bfloat16'
    >>> Factors().obstacle(Spec("conv.weight", (8, 3, 3, 3), "float32", 0))
    "it is no fully connected layer's: route it to Dense()"
    """

    form: ClassVar[LayerForm] = "factors"
    early: ClassVar[bool] = True
    counted: ClassVar[tuple[str, str]] = ("rows of X", "of dY")

    def obstacle(self, spec: Spec) -> str:
        if spec.form == "factors":
            return ""
        return spec.obstacle or "it is no fully connected layer's: route it to Dense()"

    def matrices(self, layer: Layer) -> tuple[Wanted, Wanted]:
        return Wanted(layer.inputs), Wanted(layer.outputs)

    def accumulate(
        self, math: LayerMath, layer: Layer, first: Values, second: Values, rows: int, share: float
    ) -> None:
        """Add one matrix product of the two stacks."""
        math.multiply(layer, second, first, rows, share)
