"""The names of state at holders and of its entries, in messages and in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.errors import FrameRefused
from slipstream.types import ITEM_BYTES, Chunk, Entry

WEIGHTS, AVERAGE = "weights", "averaged weights"
SCALAR_STATE = frozenset({"step", "mu_product", "eta", "mu"})
STATE_BYTES = ITEM_BYTES | {"int64": 8}
MOST_ENTRIES = 16  # of a segment

# Names of messages about a chunk. ``WEIGHTS`` alone replaces weights, ``FIRST_WEIGHTS`` also begins
# averages anew with them. ``SNAPSHOT`` asks for the state of all chunks after the same decisions.
# Residuals are a member's own as a worker, or as a holder.
STATE, FIRST_WEIGHTS, SNAPSHOT = "state", "first weights", "snapshot"
RESIDUAL, PUBLISHED = "residual", "published residual"

Memory = list[np.ndarray[Any, np.dtype[np.uint8]]]


def is_scalar(name: str) -> bool:
    """Return whether a state entry is one number per tensor, not per element."""
    return name in SCALAR_STATE


def room_for(chunk: Chunk, entries: Sequence[Entry]) -> Memory:
    """Return memory for entries of a chunk's state.

    Raises:
        FrameRefused: There is no such segment or format, or there are too many entries.
    """
    segments = chunk.segments
    if len(entries) > MOST_ENTRIES * len(segments):
        raise FrameRefused(
            f"chunk {chunk.index}: {len(entries)} entries, expected at most {MOST_ENTRIES} for "
            f"each of {len(segments)} segments"
        )
    room = []
    for segment, name, dtype in entries:
        if not 0 <= segment < len(segments) or dtype not in STATE_BYTES:
            raise FrameRefused(
                f"chunk {chunk.index}: entry {name} of segment {segment} in {dtype}, expected one "
                f"of {len(segments)} segments and of {sorted(STATE_BYTES)}"
            )
        numel = 1 if is_scalar(name) else segments[segment].numel
        room.append(np.empty(numel * STATE_BYTES[dtype], np.uint8))
    return room


def room_in(chunk: Chunk, dtype: str, _: Sequence[Entry] = ()) -> Memory:
    """Return memory for one value of each element of a chunk, by segment."""
    return [np.empty(s.numel * STATE_BYTES[dtype], np.uint8) for s in chunk.segments]
