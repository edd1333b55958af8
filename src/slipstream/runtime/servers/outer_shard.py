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
from slipstream.transports import wire
from slipstream.transports.wire import Fetch, Load, Message, checksum, refuse_damaged
from slipstream.types import ITEM_BYTES, Chunk, Node, Settings, Values

Array = np.ndarray[Any, np.dtype[Any]]
Entry = tuple[int, str, str]  # segment, name, dtype


class OuterShard:
    """The chunks that a server holds; implements ``StatefulUpdater``."""

    def __init__(self, plan: Plan, node: Node, optimizer: OuterOptimizer) -> None:
        self._chunks = {
            chunk.index: OuterChunk(plan, chunk, optimizer) for chunk in plan.chunks_of(node)
        }

    def _chunk(self, index: int) -> OuterChunk:
        if index not in self._chunks:
            raise FrameRefused(f"chunk {index} is not held here")
        return self._chunks[index]

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
        held = self._chunk(chunk.index)
        held.update(mean)
        return held.current([whole or values is not None for values in mean])

    def current(self, chunk: Chunk) -> Sequence[Values | None]:
        return self._chunk(chunk.index).current([True] * len(chunk.segments))

    def load(self, message: Message[Load]) -> None:
        """Load weights.

        Raises:
            FrameRefused: They are damaged, or do not match the chunk.
        """
        refuse_damaged(message, message.body.crc)
        self._chunk(message.body.chunk).load(message.frames)

    def load_state(self, message: Message[wire.State]) -> None:
        """Load the optimizer's state.

        Raises:
            FrameRefused: It is damaged, or does not match the chunk or the optimizer.
        """
        refuse_damaged(message, message.body.crc)
        self._chunk(message.body.chunk).load_state(message.body.entries, message.frames)

    def fetch(self, message: Message[Fetch]) -> tuple[wire.State, list[bytes]]:
        return self.state(message.body.chunk)

    def state(self, chunk: int) -> tuple[wire.State, list[bytes]]:
        entries, frames = self._chunk(chunk).state()
        return wire.State(chunk, entries, checksum(frames)), frames


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

    def load(self, frames: Sequence[Any]) -> None:
        sizes = [values.data.nbytes for values in self._values]
        if [memoryview(frame).nbytes for frame in frames] != sizes:
            raise FrameRefused(f"weights of chunk {self._chunk.index} have other sizes")
        for values, frame in zip(self._values, frames, strict=True):
            values.data[:] = np.frombuffer(frame, np.uint8)

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

    def load_state(self, entries: Sequence[Entry], frames: Sequence[Any]) -> None:
        """Replace all of the state; segments without entries begin anew."""
        if len(entries) != len(frames):
            raise FrameRefused(
                f"state of chunk {self._chunk.index}: {len(frames)} frames, not {len(entries)}"
            )
        states: dict[int, State] = {}
        for (place, name, dtype), frame in zip(entries, frames, strict=True):
            if name != WEIGHTS:
                states.setdefault(place, {})[name] = self._entry(place, name, dtype, frame)
        for place, state in states.items():
            kept = self._optimizer.init(widened(self._values[place])).keys()
            if state.keys() != kept:
                raise FrameRefused(
                    f"state of segment {place} has {sorted(state)[:8]}, and the outer optimizer "
                    f"keeps {sorted(kept)}"
                )
        self._states = states

    def _entry(self, place: int, name: str, dtype: str, frame: Any) -> Array | float:
        """One entry of a segment's state: its number of updates, or one value for each element."""
        numel = self._chunk.segments[place].numel if 0 <= place < len(self._is_weight) else 0
        count = 1 if name == STEP else numel
        nbytes = memoryview(frame).nbytes
        if not numel or not self._is_weight[place] or nbytes != count * ITEM_BYTES.get(dtype, 0):
            raise FrameRefused(
                f"state entry {name} of segment {place} is {nbytes} bytes of {dtype}, not {count} "
                "values of a weight"
            )
        content = np.frombuffer(frame, np.uint8).copy()
        if name == STEP:
            (number,) = as_format(content, dtype, "float64")
            return float(number)
        return as_format(content, dtype, format_of(self._chunk.dtype))


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
