"""Contributions of a layer: two matrices, from whose product comes the layer's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from slipstream.codecs import Codec, LayerCodec
from slipstream.codecs.matrices import Scratch
from slipstream.codecs.residual import Residual
from slipstream.errors import FrameRefused
from slipstream.plan import Plan
from slipstream.runtime.exchange.payloads.contributions import ClosedRound, Group
from slipstream.runtime.exchange.payloads.payload import Payload, Sinks
from slipstream.transports.wire import Push
from slipstream.types import Buffer, Unit


class LayerPayload(Payload):
    """All rows of all workers are stacked; ``Sinks.math`` computes the gradient from them."""

    takes_early: ClassVar[bool] = True

    def __init__(self, plan: Plan, unit: Unit, up: LayerCodec) -> None:
        super().__init__(plan, unit)
        assert unit.layer is not None
        self._up, self._layer = up, unit.layer
        self._scratch = Scratch()

    def residuals(self) -> list[Residual | None]:
        return []

    def codec(self, round_: int) -> Codec:
        raise NotImplementedError(
            "a layer has no places: its matrices are encoded where they arise"
        )

    def examine_early(self, frames: Sequence[Buffer]) -> None:
        self._up.examine_early(frames, self._layer)

    def examine(
        self, body: Push, frames: Sequence[Buffer], early: Sequence[Buffer] | None
    ) -> tuple[Group, ...]:
        if list(body.counts) != [len(frames)]:
            raise FrameRefused(f"{len(frames)} frames where {body.counts} were announced")
        if not frames:
            return (None,)
        whole = [*(early or ()), *frames]
        self._up.examine(whole, self._layer)
        return (whole,)

    def combine(self, closed: ClosedRound, sinks: Sinks) -> Sequence[int]:
        given, math = closed.given(0), sinks.math
        if given and math is not None:
            divisor = closed.divisor(self.plan, 0)
            layer = sinks.in_precision(self._layer)
            self._up.combine(given, layer, math, self._scratch, divisor=divisor)
        return ()
