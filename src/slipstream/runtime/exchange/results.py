"""Writes a worker's results into place: decoded, or combined from a mesh's contributions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slipstream.codecs.matrices import LayerMath
from slipstream.plan import Plan
from slipstream.runtime.exchange.channel import Slots
from slipstream.runtime.exchange.unit_state import Answer, UnitState
from slipstream.types import Layer, Segment, Values


class ResultWriter:
    """Writes answers into the sinks of their tensors; called by the training thread only.

    It implements ``Sinks``.
    """

    takes_values = True

    def __init__(self, plan: Plan, slots: Slots, math: LayerMath | None) -> None:
        self.math = math
        self._plan, self._slots = plan, slots
        self._sinks: dict[int, Values] = {}
        self._absent: dict[int, list[Segment]] = {}  # by tensor: segments without a contribution

    @property
    def written(self) -> Collection[int]:
        """Tensors into which something was written since they were last finished."""
        return self._sinks.keys()

    def write(self, state: UnitState, answer: Answer) -> list[int]:
        """Write a result into place; returns its tensors, also those without a contribution."""
        if answer.closed is not None:
            return list(state.payload.combine(answer.closed, self))
        touched: list[int] = []
        for _, (body, frames) in sorted(answer.parts.items()):
            touched += state.payload.open(body, frames, self)
        return list(dict.fromkeys(touched))

    def finish(self, tensor: int) -> None:
        """The whole result of a tensor is written, if there is any."""
        absent, sink = self._absent.pop(tensor, []), self._sinks.pop(tensor, None)
        if sink is not None:
            self._clear(tensor, sink, absent)
            self._slots.finish(tensor)

    def finish_all(self) -> None:
        for tensor in {*self._sinks, *self._absent}:
            self.finish(tensor)

    def sink(self, place: Segment) -> Values:
        if place.tensor not in self._sinks:
            self._sinks[place.tensor] = self._slots.sink(place.tensor)
        return self._sinks[place.tensor].part(place.start, place.stop)

    def leave_out(self, place: Segment) -> None:
        self._absent.setdefault(place.tensor, []).append(place)

    def in_precision(self, layer: Layer) -> Layer:
        return layer

    def _clear(self, tensor: int, sink: Values, absent: Sequence[Segment]) -> None:
        """Zero the gradient of segments nobody contributed; their sender may have died midway.

        Weights that come back are not changed there.
        """
        is_gradient = not self._plan.update.holder_applies
        if is_gradient and self._plan.specs[tensor].role == "parameter":
            for segment in absent:
                sink.part(segment.start, segment.stop).data[:] = 0
