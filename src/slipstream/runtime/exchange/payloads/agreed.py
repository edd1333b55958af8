"""Contributions of whole tensors in a basis that all ends agree on, round by round.

What a round's contributions amount to, merged, goes to all workers: it is the result where the way
down is the same codec, and beside the result elsewhere. The next rounds' basis follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.codecs import Codec, SharedCodec
from slipstream.codecs.residual import Residual
from slipstream.errors import FrameRefused
from slipstream.plan import Plan
from slipstream.runtime.exchange.payloads.contributions import ClosedRound, Group
from slipstream.runtime.exchange.payloads.payload import Payload, Sinks, split_frames
from slipstream.transports.wire import Publish, Push
from slipstream.types import Buffer, EncodeContext, Unit, Values


class AgreedPayload(Payload):
    """One tensor; what its ends have learned in earlier rounds is kept here."""

    def __init__(self, plan: Plan, unit: Unit, up: SharedCodec) -> None:
        super().__init__(plan, unit)
        (self._place,) = unit.places
        self._shape = plan.specs[self._place.tensor].shape
        self._up = up
        self._known = up.agree(self._shape, ahead=max(1, plan.consistency.under_way))
        self._merged: Buffer = b""  # the last round's contributions

    def residuals(self) -> list[Residual | None]:
        return [self._up.init(self._place.numel, self.unit.chunks[0].dtype)]

    def codec(self, round_: int) -> Codec:
        return self._known.at(round_)

    def examine(
        self, body: Push, frames: Sequence[Buffer], early: Sequence[Buffer] | None
    ) -> tuple[Group, ...]:
        groups = split_frames([self._place.numel], body.counts, frames, 1)
        for frame in frames:
            self._up.examine(frame, self._shape)
        return groups

    def combine(self, closed: ClosedRound, sinks: Sinks) -> Sequence[int]:
        given, codec = closed.given(0), self._known.at(closed.round)
        divisor = closed.divisor(self.plan, 0)
        self._merged = codec.merge(given, divisor=divisor) if given else b""
        self._known.learn(closed.round, self._merged if given else None)
        if not given:
            sinks.leave_out(self._place)
        elif sinks.takes_values:
            codec.decode_into((self._merged,), sinks.sink(self._place))
        return self.unit.tensors

    @property
    def parts(self) -> int:
        """Where merged contributions are the result, it is one message."""
        return 1 if self.down is None else super().parts

    def answer(
        self,
        part: int,
        values: Sequence[Values | None],
        residuals: Sequence[Residual | None],
        ctx: EncodeContext,
    ) -> tuple[list[Buffer], list[int]]:
        frames, counts = super().answer(part, values, residuals, ctx)
        return ([*frames, self._merged] if part == 0 else frames), counts

    def examine_answer(self, body: Publish, frames: Sequence[Buffer]) -> None:
        rest, merged = self._apart(body, frames)
        if self.down is None:
            split_frames([], body.counts, rest, 1)
        else:
            super().examine_answer(body, rest)
        if merged is not None:
            self._up.examine(merged, self._shape)

    def open(self, body: Publish, frames: Sequence[Buffer], sinks: Sinks | None) -> Sequence[int]:
        rest, merged = self._apart(body, frames)
        touched = super().open(body, rest, sinks)
        if self.down is None and sinks is not None:
            touched = self.unit.tensors
            if merged is None:
                sinks.leave_out(self._place)
            else:
                self._known.at(body.round).decode_into((merged,), sinks.sink(self._place))
        if body.part == 0:
            self._known.learn(body.round, merged)
        return touched

    def _apart(
        self, body: Publish, frames: Sequence[Buffer]
    ) -> tuple[Sequence[Buffer], Buffer | None]:
        """The frames of values, and the merged contributions; None if there were none.

        Raises:
            FrameRefused: A first part without its last frame.
        """
        if body.part:
            return frames, None
        if not frames:
            raise FrameRefused(f"a result of unit {self.unit.index} without its contributions")
        *rest, last = frames
        return rest, last if memoryview(last).nbytes else None
