"""The interface of payloads: what one end of a unit's links does with its messages.

Results are sent chunk by chunk, encoded with the route's ``down``. A payload that sends them in
another way overrides ``answer``, ``examine_answer`` and ``open``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from slipstream.codecs import Codec, SharedCodec
from slipstream.codecs.matrices import LayerMath
from slipstream.codecs.residual import Residual
from slipstream.errors import FrameRefused
from slipstream.plan import Plan
from slipstream.runtime.exchange.payloads.contributions import ClosedRound, Group
from slipstream.transports.wire import Publish, Push
from slipstream.types import Buffer, EncodeContext, Layer, Segment, Unit, Values


class Sinks(Protocol):
    """Places for values: a worker's tensors, or memory for the mean at a holder."""

    @property
    def math(self) -> LayerMath | None:
        """Computes a layer's gradient from its matrices, into place; None: nowhere."""
        ...

    @property
    def takes_values(self) -> bool:
        """Whether values are wanted; else only what later rounds need."""
        ...

    def in_precision(self, layer: Layer) -> Layer:
        """The layer with the dtype in which ``math`` computes."""
        ...

    def sink(self, place: Segment) -> Values:
        """Memory for the values of a place."""
        ...

    def leave_out(self, place: Segment) -> None:
        """No worker has contributed to this place."""
        ...


class Payload(ABC):
    """The form of one unit's contributions and results, at one end of its links.

    Attributes:
        takes_early: Whether a part of a contribution may be sent before the rest.
    """

    takes_early: ClassVar[bool] = False

    def __init__(self, plan: Plan, unit: Unit) -> None:
        self.plan, self.unit = plan, unit
        down = plan.route(unit).down
        self.down: Codec | None = None if isinstance(down, SharedCodec) else down

    # ---- contributions

    @abstractmethod
    def residuals(self) -> list[Residual | None]:
        """Empty ones for the way up, by place."""

    @abstractmethod
    def codec(self, round_: int) -> Codec:
        """The codec that encodes a place's contribution to a round."""

    def examine_early(self, frames: Sequence[Buffer]) -> None:
        """Check the part of a contribution that was sent before the rest.

        Raises:
            FrameRefused: It is no such part.
        """
        raise FrameRefused(f"unit {self.unit.index} has no matrix that leaves early")

    @abstractmethod
    def examine(
        self, body: Push, frames: Sequence[Buffer], early: Sequence[Buffer] | None
    ) -> tuple[Group, ...]:
        """Check a contribution, and return its frames by place.

        Args:
            body: The message.
            frames: Its frames.
            early: The part that was sent before, if the message counts on it.

        Raises:
            FrameRefused: The frames cannot be combined.
        """

    @abstractmethod
    def combine(self, closed: ClosedRound, sinks: Sinks) -> Sequence[int]:
        """Combine a round's contributions into place, at holders and at the workers of a mesh.

        Returns:
            The tensors of the places, also of those to which nobody has contributed; empty where
            ``sinks.math`` has written the result.
        """

    # ---- results

    @property
    def parts(self) -> int:
        """How many messages a result is: one for each chunk."""
        return len(self.unit.chunks)

    def residuals_down(self) -> list[list[Residual | None]]:
        """Empty ones for the way down, by chunk and segment."""
        down = self.down
        return [
            [None if down is None else down.init(s.numel, chunk.dtype) for s in chunk.segments]
            for chunk in self.unit.chunks
        ]

    def answer(
        self,
        part: int,
        values: Sequence[Values | None],
        residuals: Sequence[Residual | None],
        ctx: EncodeContext,
    ) -> tuple[list[Buffer], list[int]]:
        """The frames of a part of a result, and how many of them each segment has.

        Args:
            part: The number of the message.
            values: By segment of its chunk; None where nobody has contributed.
            residuals: Those of the way down, by segment; they are changed.
            ctx: The clock, the learning rate and the state of the link.
        """
        frames: list[Buffer] = []
        if (down := self.down) is None:
            return frames, []
        for each, residual in zip(values, residuals, strict=True):
            if each is not None:
                frames.extend(down.encode(each, residual, ctx))
        return frames, [0 if each is None else down.frames for each in values]

    def examine_answer(self, body: Publish, frames: Sequence[Buffer]) -> None:
        """Check a part of a result that came from a link.

        Raises:
            FrameRefused: It cannot be decoded.
        """
        assert self.down is not None
        chunk = self.unit.chunks[body.part]
        for segment, group in zip(chunk.segments, self._groups(body, frames), strict=True):
            if group is not None:
                self.down.examine(group, segment.numel, chunk.dtype)

    def open(self, body: Publish, frames: Sequence[Buffer], sinks: Sinks | None) -> Sequence[int]:
        """Write a part of a result into place.

        Args:
            body: The message.
            frames: Its frames, which have passed ``examine_answer``.
            sinks: The places; None: only take what later rounds need.

        Returns:
            The tensors of the places, also of those without values.
        """
        if self.down is None or sinks is None:
            return ()
        segments = self.unit.chunks[body.part].segments
        for segment, group in zip(segments, self._groups(body, frames), strict=True):
            if group is None:
                sinks.leave_out(segment)
            else:
                self.down.decode_into(group, sinks.sink(segment))
        return [segment.tensor for segment in segments]

    def _groups(self, body: Publish, frames: Sequence[Buffer]) -> tuple[Group, ...]:
        """The frames of a part of a result, by segment of its chunk.

        Raises:
            FrameRefused: There are more frames or fewer.
        """
        assert self.down is not None
        numels = [segment.numel for segment in self.unit.chunks[body.part].segments]
        return split_frames(numels, body.counts, frames, self.down.frames)


def split_frames(
    segments: Sequence[int], counts: Sequence[int], frames: Sequence[Buffer], per_segment: int
) -> tuple[Group, ...]:
    """Frames by segment, or FrameRefused when their numbers are wrong."""
    if len(counts) != len(segments) or set(counts) - {0, per_segment}:
        raise FrameRefused(f"frames for {len(counts)} segments where there are {len(segments)}")
    if len(frames) != sum(counts):
        raise FrameRefused(f"{len(frames)} frames where {sum(counts)} were announced")
    groups: list[Group] = []
    used = 0
    for count in counts:
        groups.append(frames[used : used + count] if count else None)
        used += count
    return tuple(groups)
