"""The types that all axes share: tensors, their pieces, and the cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

Rank = int
Node = int  # workers are 0 … n-1, servers n … n+s-1

# A torch optimizer's settings: one value, and all of them by group of parameters.
Setting = bool | int | float | None | list[float] | str
Settings = list[dict[str, Setting]]

LARGEST_CHUNK_BYTES = 8 * 1024 * 1024  # the largest message

ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Cluster:
    """``workers`` workers and ``servers`` servers; their nodes are numbered in this order.

    ``members`` is for two levels, where the workers of this cluster are hosts: the ranks on each of
    them, the first of which represents the others. Empty: worker i is rank i.

    >>> hosts = Cluster(workers=2, members=((0, 1, 2), (3,)))
    >>> hosts.name(1), hosts.worker("rank 3"), hosts.worker("rank 1"), hosts.ranks
    ('rank 3', 1, -1, 4)
    """

    workers: int
    servers: int = 0
    dedicated: bool = False  # servers on separate hosts, not colocated with workers
    members: tuple[tuple[Rank, ...], ...] = ()

    @property
    def worker_nodes(self) -> tuple[Node, ...]:
        return tuple(range(self.workers))

    @property
    def server_nodes(self) -> tuple[Node, ...]:
        return tuple(range(self.workers, self.workers + self.servers))

    def name(self, node: Node) -> str:
        """Return the name of a node in messages: ``rank 2`` or ``server 0``."""
        if node >= self.workers:
            return f"server {node - self.workers}"
        return f"rank {self.members[node][0] if self.members else node}"

    def worker(self, name: str) -> Node:
        """Return the worker of this name; -1 if there is none."""
        kind, _, number = name.partition(" ")
        rank = int(number) if kind == "rank" and number.isdecimal() and len(number) < 10 else -1
        if not self.members:
            return rank if rank < self.workers else -1
        leaders = (host[0] for host in self.members)
        return next((node for node, leader in enumerate(leaders) if leader == rank), -1)

    def ranks_at(self, node: Node) -> tuple[Rank, ...]:
        """Return the ranks that a worker of this cluster represents."""
        return self.members[node] if self.members else (node,)

    def node_of(self, rank: Rank) -> Node:
        """Return the worker of this cluster that represents a rank; -1 if there is none."""
        nodes = (node for node in self.worker_nodes if rank in self.ranks_at(node))
        return next(nodes, -1)

    @property
    def ranks(self) -> int:
        """The number of ranks on all hosts."""
        return sum(map(len, self.members)) if self.members else self.workers


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor that is kept equal across workers.

    ``order`` is its position in the forward pass. A parameter's mean is over all workers (it counts
    as zero on a worker that did not use it); a buffer's mean is over the workers on which it
    changed.

    ``layer`` names the tensor's layer, if that layer's gradient has a compact form, and ``form``
    is this form: a fully connected layer's factors, or the used rows of a table. ``transposed``
    is True if the layer's weight is inputs × outputs. ``obstacle`` is the reason why a layer's
    gradient has no compact form.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    order: int
    role: Literal["parameter", "buffer"] = "parameter"
    layer: str = ""
    obstacle: str = ""
    form: Literal["", "factors", "rows"] = ""
    transposed: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Segment:
    """The elements ``start`` to ``stop`` of one flattened tensor."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """The content of one message: neighbouring pieces of tensors of one dtype and one route."""

    index: int
    route: int
    dtype: str
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer whose gradient has a compact form: its matrix is ``outputs`` × ``inputs``.

    ``weight`` and ``bias`` are tensors by index (``bias`` None if there is none); ``dtype`` is the
    weight's. The weight of a ``transposed`` layer is ``inputs`` × ``outputs``.
    """

    name: str
    form: Literal["factors", "rows"]
    outputs: int
    inputs: int
    weight: int
    bias: int | None
    dtype: str
    transposed: bool = False

    @property
    def tensors(self) -> tuple[int, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of the model with one ledger: a chunk, all chunks of a tensor whose contributions are
    not cut, or all tensors of a layer (weight and bias share dY).

    ``route`` is the number of its route in the plan. ``chunks`` are those of the layout: dense
    results are sent chunk by chunk.
    """

    index: int
    route: int
    chunks: tuple[Chunk, ...]
    layer: Layer | None = None

    @property
    def tensors(self) -> tuple[int, ...]:
        if self.layer is not None:
            return self.layer.tensors
        return tuple(dict.fromkeys(s.tensor for chunk in self.chunks for s in chunk.segments))

    @property
    def places(self) -> tuple[Segment, ...]:
        """The segments of contributions to a unit that is no layer. Neighbouring pieces of a tensor
        are one segment, though their results are sent chunk by chunk."""
        if len(self.chunks) == 1:
            return self.chunks[0].segments
        joined: list[Segment] = []
        for segment in (s for chunk in self.chunks for s in chunk.segments):
            last = joined[-1] if joined else None
            if last is not None and (last.tensor, last.stop) == (segment.tensor, segment.start):
                joined[-1] = Segment(last.tensor, last.start, segment.stop)
            else:
                joined.append(segment)
        return tuple(joined)


@dataclass(frozen=True, slots=True)
class EncodeContext:
    """The state of a link and of the training, for encoders.

    Attributes:
        clock: The clock t, from 1.
        rate: The learning rate relative to the first one, lrₜ / lr₀.
        congested: True if the link is congested.
        workers: The number of workers over which values are averaged.
    """

    clock: int = 1
    rate: float = 1.0
    congested: bool = False
    workers: int = 1


HERE = EncodeContext()  # for codecs that need no context

Buffer = memoryview | bytes | bytearray | np.ndarray[Any, np.dtype[np.uint8]]
Entry = tuple[int, str, str]  # of a chunk's state: segment, name, dtype


@dataclass(frozen=True, slots=True)
class Values:
    """A flat array of numbers as raw bytes, with its dtype (numpy has no bfloat16)."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: str

    @classmethod
    def empty(cls, numel: int, dtype: str) -> Values:
        return cls(np.empty(numel * ITEM_BYTES[dtype], dtype=np.uint8), dtype)

    @property
    def numel(self) -> int:
        return self.data.nbytes // ITEM_BYTES[self.dtype]

    def part(self, start: int, stop: int) -> Values:
        size = ITEM_BYTES[self.dtype]
        return Values(self.data[start * size : stop * size], self.dtype)


def rank_of(name: str, kind: str = "rank") -> int:
    """Return the number in a name: 2 for ``rank 2``; -1 for anything else."""
    prefix, _, number = name.partition(" ")
    return int(number) if prefix == kind and number.isdecimal() and len(number) < 10 else -1


class OptimizerRecipe(msgspec.Struct, frozen=True):
    """A torch optimizer by name, its settings by group, and the group of every tensor."""

    name: str
    settings: Settings
    group_of: list[int]
