"""Contributions by segment: a chunk's pieces of tensors, each encoded by itself."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.codecs import Codec
from slipstream.codecs.residual import Residual
from slipstream.plan import Plan
from slipstream.runtime.exchange.payloads.contributions import ClosedRound, Group
from slipstream.runtime.exchange.payloads.payload import Payload, Sinks, split_frames
from slipstream.transports.wire import Push
from slipstream.types import Buffer, Unit


class SegmentPayload(Payload):
    """One chunk; a segment's contributions are summed, and its mean is one of the chunk's."""

    def __init__(self, plan: Plan, unit: Unit, up: Codec) -> None:
        super().__init__(plan, unit)
        self._up = up
        (self._chunk,) = unit.chunks

    def residuals(self) -> list[Residual | None]:
        return [self._up.init(each.numel, self._chunk.dtype) for each in self._chunk.segments]

    def codec(self, round_: int) -> Codec:
        return self._up

    def examine(
        self, body: Push, frames: Sequence[Buffer], early: Sequence[Buffer] | None
    ) -> tuple[Group, ...]:
        segments = self._chunk.segments
        groups = split_frames([s.numel for s in segments], body.counts, frames, self._up.frames)
        for segment, group in zip(segments, groups, strict=True):
            if group is not None:
                self._up.examine(group, segment.numel, self._chunk.dtype)
        return groups

    def combine(self, closed: ClosedRound, sinks: Sinks) -> Sequence[int]:
        for place, segment in enumerate(self._chunk.segments):
            if given := closed.given(place):
                divisor = closed.divisor(self.plan, place)
                self._up.combine(given, sinks.sink(segment), divisor=divisor)
            else:
                sinks.leave_out(segment)
        return self.unit.tensors
