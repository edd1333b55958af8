"""Flat memory for collectives: a bucket for each chunk, and the reductions that sum several.

Buckets of one format are neighbours in one piece of memory, in the order in which a backward pass
completes them. A reduction sums neighbours with one collective: a strategy that sends some layers
another way in some steps has a chunk for each layer, and small chunks on their own would cost more
than their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from slipstream.codecs import Dense
from slipstream.errors import IncompatibleRoute
from slipstream.plan import Plan
from slipstream.planning.layout import Group, even_numel
from slipstream.routes import Collective
from slipstream.types import ITEM_BYTES, Chunk, Segment

STEP_DIGITS = 16  # of the step; workers that differ differ by less than this can tell
ALIGNED_BYTES = 16  # buckets begin at multiples of this


@dataclass(slots=True, eq=False)
class Place:
    """One segment's memory in its bucket.

    Attributes:
        start: Of the segment within its tensor.
        memory: The same bytes for the native kernels; None where the bucket is on an accelerator.
        whole: The same memory in the tensor's own shape, if the segment is a whole tensor.
    """

    tensor: int
    start: int
    values: torch.Tensor
    memory: Any
    whole: torch.Tensor | None

    @classmethod
    def of(cls, segment: Segment, values: torch.Tensor, parameter: torch.Tensor) -> Place:
        """The place of a segment of this parameter."""
        is_whole = values.numel() == parameter.numel() and not parameter.is_complex()
        whole = values.view(parameter.shape) if is_whole else None
        memory = values.view(torch.uint8).numpy() if values.device.type == "cpu" else None
        return cls(segment.tensor, segment.start, values, memory, whole)

    @property
    def end(self) -> int:
        return self.start + self.values.numel()


@dataclass(slots=True, eq=False)
class Bucket:
    """One chunk's memory: its values, then room for a mark per segment and for the step's digits.

    Attributes:
        first: Where it begins in the memory of its format.
        end: Where the next one begins.
        present: Tensors with a gradient of this worker.
        unready: How many of its segments are not complete yet in this round.
    """

    chunk: Chunk
    memory: torch.Tensor
    first: int
    end: int
    places: list[Place]
    tensors: tuple[int, ...]
    present: set[int] = field(default_factory=set)
    unready: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """The next round begins."""
        self.unready = len(self.places)

    @property
    def marks(self) -> range:
        """Where its marks are in the memory of its format."""
        begin = self.first + self.chunk.numel
        return range(begin, begin + len(self.places))


class Reduction:
    """Neighbouring buckets that are summed with one collective.

    Marks are part of what is summed: they show whether any worker had a gradient, and whether all
    workers are at the same step, without a separate collective. The step is sent as its last binary
    digits: even the shortest format can sum each of them.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = tuple(buckets)
        self.tensors = frozenset(tensor for bucket in buckets for tensor in bucket.tensors)
        self.places = tuple(place for bucket in buckets for place in bucket.places)
        first, last = buckets[0], buckets[-1]
        self.flat = first.memory[first.first : last.end]
        self.work: Any = None
        self.step = 0  # in which it was launched
        marks = [at - first.first for bucket in buckets for at in bucket.marks]
        after = last.marks.stop - first.first
        self._marks = torch.tensor([*marks, *range(after, after + STEP_DIGITS)])

    @property
    def is_ready(self) -> bool:
        return not any(bucket.unready for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def mark(self, step: int) -> None:
        """Write the marks, before the values are summed."""
        self.step = step
        present = [float(p.tensor in b.present) for b in self.buckets for p in b.places]
        marks = torch.tensor(present + digits(step), dtype=self.flat.dtype)
        self.flat[self._marks] = marks.to(self.flat.device)

    def sums(self) -> tuple[list[bool], list[float]]:
        """By segment, whether any worker had it; and the sums of the step's digits."""
        found: list[float] = self.flat[self._marks].tolist()
        return [count > 0 for count in found[:-STEP_DIGITS]], found[-STEP_DIGITS:]


def make_buckets(
    plan: Plan, parameters: Sequence[torch.Tensor], device: torch.device
) -> list[Bucket]:
    """A bucket for each chunk that is sent by collectives, in the order of their completion.

    Args:
        parameters: The plan's tensors.
        device: Where the buckets are.

    Raises:
        IncompatibleRoute: A route's codec is not dense.
    """
    chunks = [c for c in plan.chunks if isinstance(plan.routes[c.route].over, Collective)]
    # A chunk is complete with the tensor that the forward pass used first.
    chunks.sort(key=lambda c: -min(plan.specs[s.tensor].order for s in c.segments))
    sizes: dict[str, int] = {}
    spans = []
    for chunk in chunks:
        dtype = wire_dtype(plan, chunk)
        room = chunk.numel + len(chunk.segments) + STEP_DIGITS
        line = ALIGNED_BYTES // ITEM_BYTES[dtype]
        first = sizes.get(dtype, 0)
        sizes[dtype] = first + -(-room // line) * line
        spans.append((dtype, first, sizes[dtype]))
    memories = {
        dtype: torch.zeros(size, dtype=getattr(torch, dtype), device=device)
        for dtype, size in sizes.items()
    }
    return [
        Bucket(
            chunk,
            memories[dtype],
            first,
            end,
            list(places_in(chunk, memories[dtype][first:end], parameters)),
            tuple(segment.tensor for segment in chunk.segments),
        )
        for chunk, (dtype, first, end) in zip(chunks, spans, strict=True)
    ]


def wire_dtype(plan: Plan, chunk: Chunk) -> str:
    """The format in which a chunk is summed.

    Raises:
        IncompatibleRoute: Its codec is not dense.
    """
    codec = plan.routes[chunk.route].up
    if type(codec) is not Dense:  # a part derived from it does something else
        raise IncompatibleRoute(f"collectives carry dense values only, not {codec.name}")
    return codec.wire_dtype(chunk.dtype)


def places_in(
    chunk: Chunk, values: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> Iterator[Place]:
    """The places of a chunk's segments, one after the other."""
    offset = 0
    for segment in chunk.segments:
        room = values[offset : offset + segment.numel]
        yield Place.of(segment, room, parameters[segment.tensor])
        offset += segment.numel


def reductions(buckets: Iterable[Bucket], chunk_bytes: int) -> list[Reduction]:
    """All reductions of a round that has these buckets; the same on every worker.

    Neighbours are summed together until they are about as large as the chunks into which a model of
    their size would be cut.
    """
    found: list[Reduction] = []
    for _, group in groupby(buckets, lambda bucket: id(bucket.memory)):
        same = list(group)
        total = sum(bucket.chunk.numel for bucket in same)
        wanted = even_numel(total, Group(0, same[0].chunk.dtype, "parameter"), chunk_bytes)
        run = [same[0]]
        for bucket in same[1:]:
            if run[-1].end != bucket.first or is_full(run, bucket, wanted):
                found.append(Reduction(run))
                run = []
            run.append(bucket)
        found.append(Reduction(run))
    return found


def is_full(run: Sequence[Bucket], following: Bucket, wanted: int) -> bool:
    """Whether a reduction has the wanted size, or is nearer to it without the bucket that follows.

    A bucket that is small beside it joins anyway: on its own it would cost more.
    """
    numel = sum(bucket.chunk.numel for bucket in run)
    added = following.chunk.numel
    return numel >= 1.5 * wanted or (numel + added / 2 > wanted and added > wanted / 8)


def digits(step: int) -> list[float]:
    """The last binary digits of a step.

    >>> digits(5)[:4]
    [1.0, 0.0, 1.0, 0.0]
    """
    return [float(step >> digit & 1) for digit in range(STEP_DIGITS)]
