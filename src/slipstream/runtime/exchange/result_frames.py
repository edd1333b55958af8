"""What a result's message holds: a chunk's values, and what workers learn for later rounds."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.codecs import Agreement, Codec, SharedCodec
from slipstream.errors import FrameRefused
from slipstream.plan import Plan
from slipstream.runtime.exchange.collector import Group, split_frames
from slipstream.transports.wire import Publish
from slipstream.types import Buffer, Unit


def down_codec(plan: Plan, unit: Unit) -> Codec | None:
    """What a unit's results are encoded with; None: they return as contributions came, merged."""
    codec = plan.route(unit).down
    return None if isinstance(codec, SharedCodec) else codec


def agreement_on(plan: Plan, unit: Unit) -> Agreement | None:
    """What all ends know alike of a unit before its first round; None: they need not agree."""
    codec = plan.route(unit).up
    if not isinstance(codec, SharedCodec):
        return None
    shape = plan.specs[unit.tensors[0]].shape
    return codec.agree(shape, ahead=max(1, plan.consistency.under_way))


def result_parts(plan: Plan, unit: Unit) -> int:
    """How many messages a result is: one for each chunk, if it is not merged contributions."""
    return 1 if isinstance(plan.route(unit).down, SharedCodec) else len(unit.chunks)


def tells_merged(plan: Plan, unit: Unit, part: int) -> bool:
    """Whether the last frame of this part of a result is what its contributions were merged to."""
    return part == 0 and isinstance(plan.route(unit).up, SharedCodec)


def open_result(
    plan: Plan, unit: Unit, body: Publish, frames: Sequence[Buffer]
) -> tuple[tuple[Group, ...], Buffer | None]:
    """The frames of a result, by segment of its chunk, and the merged contributions if it has any.

    Raises:
        FrameRefused: There are more frames or fewer.
    """
    codec, merged = down_codec(plan, unit), None
    if tells_merged(plan, unit, body.part):
        if not frames:
            raise FrameRefused(f"a result of unit {unit.index} without its contributions")
        *frames, last = frames
        merged = last if memoryview(last).nbytes else None
    if codec is None:
        return split_frames([], body.counts, frames, 1), merged
    numels = [segment.numel for segment in unit.chunks[body.part].segments]
    return split_frames(numels, body.counts, frames, codec.frames), merged


def examine_result(plan: Plan, unit: Unit, body: Publish, frames: Sequence[Buffer]) -> None:
    """Check a result that came from a link.

    Raises:
        FrameRefused: It cannot be decoded.
    """
    groups, merged = open_result(plan, unit, body, frames)
    codec, up, chunk = down_codec(plan, unit), plan.route(unit).up, unit.chunks[body.part]
    for segment, group in zip(chunk.segments, groups, strict=codec is not None):
        if group is not None and codec is not None:
            codec.examine(group, segment.numel, chunk.dtype)
    if merged is not None and isinstance(up, SharedCodec):
        up.examine(merged, plan.specs[unit.tensors[0]].shape)
