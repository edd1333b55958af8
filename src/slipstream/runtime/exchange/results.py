"""Writes a worker's results into place: decoded, or combined from a mesh's contributions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slipstream.codecs import LayerCodec
from slipstream.codecs.matrices import LayerMath, Scratch
from slipstream.plan import Plan
from slipstream.runtime.exchange.channel import Slots
from slipstream.runtime.exchange.collector import ClosedRound
from slipstream.runtime.exchange.result_frames import down_codec, open_result, tells_merged
from slipstream.runtime.exchange.unit_state import Answer, UnitState
from slipstream.types import Buffer, Segment, Values


class ResultWriter:
    """Writes answers into the sinks of their tensors; called by the training thread only."""

    def __init__(self, plan: Plan, slots: Slots, math: LayerMath | None) -> None:
        self._plan, self._slots, self._math = plan, slots, math
        self._sinks: dict[int, Values] = {}
        self._absent: dict[int, list[Segment]] = {}  # by tensor: segments without a contribution
        self._scratch = Scratch()

    @property
    def written(self) -> Collection[int]:
        """Tensors into which something was written since they were last finished."""
        return self._sinks.keys()

    def write(self, state: UnitState, answer: Answer) -> list[int]:
        """Write a result into place; returns its tensors, also those without a contribution."""
        if answer.closed is None:
            return self._decode(state, answer)
        if state.unit.layer is not None:
            self._combine_layer(state, answer.closed)
            return []
        return self._combine_segments(state, answer.closed)

    def learn(self, state: UnitState, answer: Answer) -> None:
        """Take from a result what later rounds need, whether or not it was written."""
        for part, (body, frames) in sorted(answer.parts.items()):
            if state.agreement is not None and tells_merged(self._plan, state.unit, part):
                _, merged = open_result(self._plan, state.unit, body, frames)
                state.agreement.learn(answer.round, merged)

    def finish(self, tensor: int) -> None:
        """The whole result of a tensor is written, if there is any."""
        absent, sink = self._absent.pop(tensor, []), self._sinks.pop(tensor, None)
        if sink is not None:
            self._clear(tensor, sink, absent)
            self._slots.finish(tensor)

    def finish_all(self) -> None:
        for tensor in {*self._sinks, *self._absent}:
            self.finish(tensor)

    def _decode(self, state: UnitState, answer: Answer) -> list[int]:
        codec = down_codec(self._plan, state.unit)
        touched = []
        for part, (body, frames) in sorted(answer.parts.items()):
            groups, merged = open_result(self._plan, state.unit, body, frames)
            segments = state.unit.chunks[part].segments
            if codec is None:
                segments = state.unit.places
                groups = (None if merged is None else (merged,),)
            for segment, group in zip(segments, groups, strict=True):
                touched.append(segment.tensor)
                if group is None:
                    self._absent.setdefault(segment.tensor, []).append(segment)
                else:
                    read_by = codec or state.codec_in(answer.round)
                    assert read_by is not None
                    read_by.decode_into(group, self._sink(segment))
        self.learn(state, answer)
        return list(dict.fromkeys(touched))

    def _combine_segments(self, state: UnitState, closed: ClosedRound) -> list[int]:
        merged: Buffer | None = None
        for place, segment in enumerate(state.unit.places):
            given = closed.given(place)
            if not given:
                self._absent.setdefault(segment.tensor, []).append(segment)
                continue
            divisor = closed.divisor(self._plan, place)
            if state.agreement is not None:
                codec = state.agreement.at(closed.round)
                merged = codec.merge(given, divisor=divisor)
                codec.decode_into((merged,), self._sink(segment))
            elif state.codec is not None:
                state.codec.combine(given, self._sink(segment), divisor=divisor)
        if state.agreement is not None:
            state.agreement.learn(closed.round, merged)
        return list(dict.fromkeys(segment.tensor for segment in state.unit.places))

    def _combine_layer(self, state: UnitState, closed: ClosedRound) -> None:
        codec, layer, given = state.route.up, state.unit.layer, closed.given(0)
        if given and layer is not None and self._math is not None:
            assert isinstance(codec, LayerCodec)
            divisor = closed.divisor(self._plan, 0)
            codec.combine(given, layer, self._math, self._scratch, divisor=divisor)

    def _sink(self, segment: Segment) -> Values:
        if segment.tensor not in self._sinks:
            self._sinks[segment.tensor] = self._slots.sink(segment.tensor)
        return self._sinks[segment.tensor].part(segment.start, segment.stop)

    def _clear(self, tensor: int, sink: Values, absent: Sequence[Segment]) -> None:
        """Zero the gradient of segments nobody contributed; their sender may have died midway.

        Weights that come back are not changed there.
        """
        is_gradient = not self._plan.update.holder_applies
        if is_gradient and self._plan.specs[tensor].role == "parameter":
            for segment in absent:
                sink.part(segment.start, segment.stop).data[:] = 0
