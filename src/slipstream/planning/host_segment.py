"""The layout of the memory that the workers of one host share. Pure.

It begins with a board on which the workers publish their progress (``native/board.h``). The host's
own area follows, then one area for each worker but the first. An area has a segment for every
tensor, and one for the matrices of every layer whose gradient may be sent as factors or rows. The
host's area holds the sum of the host's contributions, and later the result of the round. The first
worker needs no area of its own, since it computes that sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream._native import board_nbytes
from slipstream.types import Layer, Spec

LINE = 64  # data of different writers begins on separate cache lines
PAGE = 4096
ROOM, LEAST_ROOM = 8, 1 << 20  # for a layer's matrices: times its gradient, plus so many bytes


@dataclass(frozen=True, slots=True)
class HostSegment:
    """Offsets in bytes from the start of the memory.

    >>> segment = HostSegment.of([Spec("w", (3, 5), "float32", 0)], workers=2)
    >>> segment.at(worker=1, tensor=0) - segment.at(worker=0, tensor=0)
    4096
    """

    workers: int
    offsets: tuple[int, ...]  # by tensor, within an area
    layers: tuple[tuple[int, int], ...]  # by layer: offset and size of the matrices
    area_nbytes: int
    areas_at: int

    @classmethod
    def of(cls, specs: Sequence[Spec], workers: int, layers: Sequence[Layer] = ()) -> HostSegment:
        """Return the layout for so many workers, these tensors and these layers."""
        sizes = [rounded(spec.nbytes, LINE) for spec in specs]
        # Matrices of more bytes than the gradient are dearer to send. Memory that nobody writes to
        # is never allocated.
        rooms = [rounded(ROOM * specs[layer.weight].nbytes + LEAST_ROOM, LINE) for layer in layers]
        *offsets, total = itertools.accumulate([*sizes, *rooms], initial=0)
        places = tuple(zip(offsets[len(specs) :], rooms, strict=True))
        board = rounded(board_nbytes(workers, len(specs)), PAGE)
        return cls(workers, tuple(offsets[: len(specs)]), places, rounded(total, PAGE), board)

    @property
    def nbytes(self) -> int:
        return self.areas_at + self.workers * self.area_nbytes

    def matrices_at(self, worker: int, layer: int) -> tuple[int, int]:
        """Return the offset of a worker's matrices of a layer, and the bytes reserved for them."""
        at, room = self.layers[layer]
        return self.areas_at + worker * self.area_nbytes + at, room

    def at(self, worker: int, tensor: int) -> int:
        """Return the offset of a worker's segment for a tensor; worker 0 stands for the host."""
        return self.areas_at + worker * self.area_nbytes + self.offsets[tensor]


def rounded(nbytes: int, unit: int) -> int:
    """Return the next multiple of a unit."""
    return -(-nbytes // unit) * unit
