"""The holder's half of a round: collect contributions, combine them, hand out the result.

A holder reacts to messages and does no I/O, so servers, mesh workers and simulations run the very
same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.errors import FrameRefused, RuntimeFault
from slipstream.strategy import Plan
from slipstream.transports.wire import Publish, Push, Settings, checksum
from slipstream.types import Buffer, Chunk, Node, Rank, Values


class Updater(Protocol):
    """What a holder makes of the mean before it publishes."""

    def examine(self, chunk: Chunk, settings: Settings | None) -> None:
        """Raise FrameRefused unless ``apply`` can take these settings."""
        ...

    def apply(
        self, chunk: Chunk, mean: Sequence[Values | None], settings: Settings | None
    ) -> Sequence[Values | None]: ...


class PublishMean:
    """The mean itself goes back; workers update."""

    def examine(self, chunk: Chunk, settings: Settings | None) -> None:
        if settings is not None:
            raise FrameRefused("optimizer settings, but workers update")

    def apply(
        self, chunk: Chunk, mean: Sequence[Values | None], settings: Settings | None
    ) -> Sequence[Values | None]:
        return mean


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's frames for one chunk, segment by segment; None where it had no gradient."""

    step: int
    segments: tuple[Sequence[Buffer] | None, ...]
    settings: Settings | None


@dataclass(slots=True)
class Progressing:
    """A chunk's open round, and what has arrived for it and for later ones."""

    round: int = 0
    arrived: dict[int, dict[Rank, Contribution]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """What a closed round sends out."""

    body: Publish
    frames: tuple[Buffer, ...]


class Holder:
    """All chunks that one node holds."""

    def __init__(self, node: Node, plan: Plan, updater: Updater) -> None:
        self.plan = plan
        self.updater = updater
        self._open = {chunk.index: Progressing() for chunk in plan.held_by(node)}
        self._memories = {
            chunk.index: [
                plan.route(chunk).publish.init(s.numel, chunk.dtype) for s in chunk.segments
            ]
            for chunk in plan.held_by(node)
        }

    def push(self, rank: Rank, body: Push, frames: Sequence[Buffer]) -> list[Result]:
        """Take a contribution; the results of the rounds it closes."""
        state = self._open.get(body.chunk)
        if state is None:
            raise FrameRefused(f"chunk {body.chunk} is not held here")
        if not 0 <= rank < self.plan.cluster.workers:
            raise FrameRefused(f"node {rank} is no worker")
        chunk = self.plan.chunks[body.chunk]
        segments = self._examine(chunk, body, frames)
        if not self.plan.consistency.admits(open_round=state.round, arrived=body.round):
            raise FrameRefused(f"round {body.round} while round {state.round} is open")
        self.updater.examine(chunk, body.settings)
        contributors = state.arrived.setdefault(body.round, {})
        if rank in contributors:
            raise FrameRefused(f"rank {rank} contributed twice to round {body.round}")
        contributors[rank] = Contribution(body.step, segments, body.settings)
        quorum = self.plan.consistency.quorum(self.plan.cluster.workers)
        results = []
        while len(state.arrived.get(state.round, ())) >= quorum:
            results.append(self._close(chunk, state))
        return results

    def _examine(
        self, chunk: Chunk, body: Push, frames: Sequence[Buffer]
    ) -> tuple[Sequence[Buffer] | None, ...]:
        codec = self.plan.route(chunk).push
        groups = split_frames(chunk, body.present, frames, codec.frames)
        for segment, group in zip(chunk.segments, groups, strict=True):
            if group is not None:
                codec.examine(group, segment.numel, chunk.dtype)
        if checksum(frames) != body.crc:
            raise FrameRefused(f"checksum of chunk {chunk.index} does not match its bytes")
        return groups

    def _close(self, chunk: Chunk, state: Progressing) -> Result:
        arrived = state.arrived.pop(state.round)
        agree_on_step(self.plan, arrived)
        contributions = [arrived[rank] for rank in sorted(arrived)]
        means = self._combine(chunk, contributions)
        results = self.updater.apply(chunk, means, contributions[0].settings)
        codec = self.plan.route(chunk).publish
        frames: list[Buffer] = []
        for values, memory in zip(results, self._memories[chunk.index], strict=True):
            if values is not None:
                frames.extend(codec.encode(values, memory))
        present = bytes(values is not None for values in results)
        body = Publish(chunk.index, state.round, present, checksum(frames))
        state.round += 1
        return Result(body, tuple(frames))

    def _combine(
        self, chunk: Chunk, contributions: Sequence[Contribution]
    ) -> tuple[Values | None, ...]:
        codec = self.plan.route(chunk).push
        flat = Values.empty(chunk.numel, chunk.dtype)
        means: list[Values | None] = []
        start = 0
        for i, segment in enumerate(chunk.segments):
            given = [g for c in contributions if (g := c.segments[i]) is not None]
            out = flat.part(start, start + segment.numel)
            start += segment.numel
            if given:
                # Workers without a gradient count as zero; a buffer is averaged over those
                # on which it changed.
                role = self.plan.specs[segment.tensor].role
                divisor = len(contributions) if role == "parameter" else len(given)
                codec.combine(given, out, divisor=divisor)
            means.append(out if given else None)
        return tuple(means)


def split_frames(
    chunk: Chunk, present: bytes, frames: Sequence[Buffer], per_segment: int
) -> tuple[Sequence[Buffer] | None, ...]:
    """Frames by segment, or FrameRefused when their number is wrong."""
    if len(present) != len(chunk.segments) or set(present) - {0, 1}:
        raise FrameRefused(f"chunk {chunk.index} has {len(chunk.segments)} segments")
    if len(frames) != sum(present) * per_segment:
        raise FrameRefused(
            f"{len(frames)} frames for {sum(present)} segments of chunk {chunk.index}"
        )
    groups: list[Sequence[Buffer] | None] = []
    used = 0
    for here in present:
        groups.append(frames[used : used + per_segment] if here else None)
        used += per_segment if here else 0
    return tuple(groups)


def agree_on_step(plan: Plan, arrived: Mapping[Rank, Contribution]) -> None:
    """All contributions to a round must come from the same step of the training loop."""
    steps = {rank: contribution.step for rank, contribution in arrived.items()}
    settings = [contribution.settings for contribution in arrived.values()]
    if any(other != settings[0] for other in settings):
        raise RuntimeFault(
            "workers have different optimizer settings (a learning rate that follows a worker's "
            "own loss?): every worker must set the same"
        )
    if len(set(steps.values())) > 1:
        told = ", ".join(f"{plan.cluster.name(r)} at step {s}" for r, s in sorted(steps.items()))
        raise RuntimeFault(
            f"workers ran different numbers of backward passes: {told}; every worker must call "
            "backward() equally often a step (use job.accumulate() for passes that only add up)"
        )
