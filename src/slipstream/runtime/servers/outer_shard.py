"""Outer weights at a server, and the outer optimizer that updates them; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream._native import mean_into
from slipstream.errors import FrameRefused
from slipstream.outer_optimizers import OuterOptimizer, State
from slipstream.outer_optimizers.outer_optimizer import STEP
from slipstream.plan import Plan
from slipstream.runtime.files.state_entries import WEIGHTS
from slipstream.types import ITEM_BYTES, Buffer, Chunk, Entry, Node, Settings, Values

Array = np.ndarray[Any, np.dtype[Any]]


class OuterShard:
    """The chunks that a server holds; implements ``StatefulUpdater``."""

    def __init__(self, plan: Plan, node: Node, optimizer: OuterOptimizer) -> None:
        self.chunks = {
            chunk.index: OuterChunk(plan, chunk, optimizer) for chunk in plan.chunks_of(node)
        }

    def examine(self, settings: Settings | None) -> None:
        """An outer optimizer's settings are in the strategy, and never change."""
        if settings is not None:
            raise FrameRefused("optimizer settings came with an outer gradient, which has none")

    def apply(
        self,
        chunk: Chunk,
        mean: Sequence[Values | None],
        settings: Settings | None,
        *,
        rate: float = 1.0,
        whole: bool = False,
    ) -> Sequence[Values | None]:
        """Update a chunk's weights with the mean outer gradient, and return the new ones.

        No outer gradient is damped, so ``rate`` is 1: ``rules`` refuse strategies that would.
        """
        held = self.chunks[chunk.index]
        held.update(mean)
        return held.current([whole or values is not None for values in mean])

    def current(self, chunk: Chunk) -> Sequence[Values | None]:
        return self.chunks[chunk.index].current([True] * len(chunk.segments))


class OuterChunk:
    """One chunk: the weights of each segment in their own format, and the state of each.

    Buffers are no weights: the mean replaces them.
    """

    def __init__(self, plan: Plan, chunk: Chunk, optimizer: OuterOptimizer) -> None:
        self._chunk, self._optimizer = chunk, optimizer
        roles = (plan.specs[segment.tensor].role for segment in chunk.segments)
        self._is_weight = [role == "parameter" for role in roles]
        self._values = [Values.empty(segment.numel, chunk.dtype) for segment in chunk.segments]
        for values in self._values:
            values.data[:] = 0
        self._states: dict[int, State] = {}  # by segment; none before the first update

    def update(self, mean: Sequence[Values | None]) -> None:
        for place, values in enumerate(mean):
            if values is None:
                continue
            if not self._is_weight[place]:
                self._values[place].data[:] = values.data
                continue
            theta = widened(self._values[place])
            state = self._states.get(place)
            if state is None:
                state = self._states[place] = self._optimizer.init(theta)
            with np.errstate(all="ignore"):  # infinite and NaN results are found by who reads them
                self._optimizer.update(theta, widened(values), state)
            self._put(place, theta)

    def _put(self, place: int, theta: Array) -> None:
        out, own = self._values[place], str(theta.dtype)
        mean_into(out.data, [theta.view(np.uint8)], own, 1.0, out_dtype=out.dtype)

    def current(self, wanted: Sequence[bool]) -> Sequence[Values | None]:
        """Copies: the next round may close while these are still being sent."""
        return [
            Values(values.data.copy(), values.dtype) if is_wanted else None
            for values, is_wanted in zip(self._values, wanted, strict=True)
        ]

    def load(self, weights: Sequence[Buffer], *, anew: bool) -> None:
        """Take weights, by segment; no averages are kept here that could begin anew."""
        for values, content in zip(self._values, weights, strict=True):
            values.data[:] = np.frombuffer(content, np.uint8)

    def state(self) -> tuple[list[Entry], list[bytes]]:
        """Weights and the optimizer's state, by segment and name."""
        entries = [(place, WEIGHTS, self._chunk.dtype) for place in range(len(self._values))]
        frames = [values.data.tobytes() for values in self._values]
        for place, state in self._states.items():
            for name, value in state.items():
                array = np.asarray(value)  # a number is one in 64 bits
                entries.append((place, name, str(array.dtype)))
                frames.append(array.tobytes())
        return entries, frames

    def load_state(self, entries: Sequence[Entry], values: Sequence[Buffer]) -> None:
        """Replace all of the state; segments without entries begin anew.

        Raises:
            FrameRefused: The outer optimizer keeps other entries.
        """
        states: dict[int, State] = {}
        for (place, name, dtype), content in zip(entries, values, strict=True):
            if name != WEIGHTS:
                states.setdefault(place, {})[name] = self._entry(place, name, dtype, content)
        for place, state in states.items():
            kept = self._optimizer.init(widened(self._values[place])).keys()
            if state.keys() != kept:
                raise FrameRefused(
                    f"state of segment {place} has {sorted(state)[:8]}, and the outer optimizer "
                    f"keeps {sorted(kept)}"
                )
        self._states = states

    def _entry(self, place: int, name: str, dtype: str, content: Buffer) -> Array | float:
        """One entry of a segment's state: its number of updates, or one value for each element."""
        if not self._is_weight[place] or dtype not in ITEM_BYTES:
            raise FrameRefused(
                f"state entry {name} of segment {place} in {dtype}, expected that of a weight, in "
                f"one of {sorted(ITEM_BYTES)}"
            )
        found = np.frombuffer(content, np.uint8)
        if name == STEP:
            (number,) = as_format(found, dtype, "float64")
            return float(number)
        return as_format(found, dtype, format_of(self._chunk.dtype))


def format_of(dtype: str) -> str:
    """The format in which values are computed: their own, or 32 bits if they are shorter."""
    return "float64" if dtype == "float64" else "float32"


def widened(values: Values) -> Array:
    """A copy in the format in which values are computed."""
    return as_format(values.data, values.dtype, format_of(values.dtype))


def as_format(content: Array, dtype: str, wanted: str) -> Array:
    out = np.empty(content.nbytes // ITEM_BYTES[dtype], wanted)
    mean_into(out.view(np.uint8), [content], dtype, 1.0, out_dtype=wanted)
    return out
