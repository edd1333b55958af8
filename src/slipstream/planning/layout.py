"""Cut tensors into chunks of at most a fixed size, in the order of the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.types import ITEM_BYTES, Chunk, Segment, Spec

CHUNK_BYTES = 2 * 1024 * 1024
SMALLEST_CHUNK_BYTES = 4 * 1024
# A small model is cut, too: its first chunks are sent while its backward pass still runs, and all
# holders are busy until its end. Below this size messages cost more than that gains.
CHUNKS_PER_SHARE = 4
WORTH_CUTTING_BYTES = 128 * 1024


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that may share a chunk: one route, one dtype, one role.

    The tensors of a ``layer`` or a ``fragment`` have their own chunks, which a round may skip. A
    tensor whose contributions are not cut counts as a layer. Chunks are cut so that ``shares``
    holders get equal loads.
    """

    route: int
    dtype: str
    role: str
    layer: str = ""
    shares: int = 1
    fragment: int = 0


def lay_out(
    specs: Sequence[Spec],
    groups: Sequence[Group],
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Chunk, ...]:
    """Cut tensors into chunks, in backward order within each group.

    Chunks have at most ``chunk_bytes``. They are smaller if holders then get equal loads, or if a
    small model would otherwise be sent in one piece.
    """
    members: dict[Group, list[int]] = {}
    for tensor in sorted(range(len(specs)), key=lambda i: -specs[i].order):
        members.setdefault(groups[tensor], []).append(tensor)
    chunks: list[Chunk] = []
    for group, tensors in members.items():
        total = sum(specs[t].numel for t in tensors)
        runs = fill(specs, tensors, even_numel(total, group, chunk_bytes))
        chunks += [
            Chunk(len(chunks) + i, group.route, group.dtype, segments)
            for i, segments in enumerate(runs)
        ]
    return tuple(chunks)


def even_numel(total: int, group: Group, chunk_bytes: int) -> int:
    """Return the elements of a chunk: the largest size within ``chunk_bytes`` that gives equal
    shares, of several chunks each if they are worth it. A layer is sent at once when it is
    complete."""
    size, shares = ITEM_BYTES[group.dtype], max(1, group.shares)
    largest = max(1, chunk_bytes // size)
    several = 1 if group.layer else CHUNKS_PER_SHARE
    worth_it = min(several, total * size // (shares * WORTH_CUTTING_BYTES))
    rounds = max(1, worth_it, -(-total // (shares * largest)))
    even = -(-total // (shares * rounds))
    return max(even, min(SMALLEST_CHUNK_BYTES // size, largest))


def fill(specs: Sequence[Spec], tensors: Sequence[int], room: int) -> Iterator[tuple[Segment, ...]]:
    """Cut the tensors, one after the other, every ``room`` elements; yield segments."""
    run: list[Segment] = []
    remaining = room
    for tensor in tensors:
        start, numel = 0, specs[tensor].numel
        while start < numel:
            stop = min(numel, start + remaining)
            run.append(Segment(tensor, start, stop))
            remaining -= stop - start
            start = stop
            if not remaining:
                yield tuple(run)
                run, remaining = [], room
    if run:
        yield tuple(run)
