"""Where everything lies in the memory that the workers of one host share. Pure.

First a board on which they tell each other how far they are (``native/board.h``), then the host's
own area, then one for each worker but the first. An area has a place for every tensor, and one for
the matrices of every layer whose gradient may travel as factors or rows. The host's
area holds the sum of the host's contributions until the result of the round takes its place; the
first worker needs no other, since it makes that sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream._native import board_nbytes
from slipstream.types import Layer, Spec

LINE = 64  # what different workers write begins on a cache line of its own
PAGE = 4096
ROOM, LEAST_ROOM = 8, 1 << 20  # for a layer's matrices: times its gradient, and bytes more


@dataclass(frozen=True, slots=True)
class HostSegment:
    """Places in bytes from the beginning of the memory.

    >>> segment = HostSegment.of([Spec("w", (3, 5), "float32", 0)], workers=2)
    >>> segment.at(worker=1, tensor=0) - segment.at(worker=0, tensor=0)
    4096
    """

    workers: int
    offsets: tuple[int, ...]  # by tensor, within an area
    layers: tuple[tuple[int, int], ...]  # the same of layers, with the room for their matrices
    area_nbytes: int
    areas_at: int

    @classmethod
    def of(cls, specs: Sequence[Spec], workers: int, layers: Sequence[Layer] = ()) -> HostSegment:
        """Of so many workers, for these tensors and layers."""
        sizes = [rounded(spec.nbytes, LINE) for spec in specs]
        # Matrices of more bytes than the gradient are dearer to send; memory that nobody writes to
        # is never made.
        rooms = [rounded(ROOM * specs[layer.weight].nbytes + LEAST_ROOM, LINE) for layer in layers]
        *offsets, total = itertools.accumulate([*sizes, *rooms], initial=0)
        places = tuple(zip(offsets[len(specs) :], rooms, strict=True))
        board = rounded(board_nbytes(workers, len(specs)), PAGE)
        return cls(workers, tuple(offsets[: len(specs)]), places, rounded(total, PAGE), board)

    @property
    def nbytes(self) -> int:
        return self.areas_at + self.workers * self.area_nbytes

    def matrices_at(self, worker: int, layer: int) -> tuple[int, int]:
        """Where a worker's matrices of a layer are, and the bytes that there is room for."""
        at, room = self.layers[layer]
        return self.areas_at + worker * self.area_nbytes + at, room

    def at(self, worker: int, tensor: int) -> int:
        """A worker's place for a tensor; worker 0 stands for the host."""
        return self.areas_at + worker * self.area_nbytes + self.offsets[tensor]


def rounded(nbytes: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-nbytes // unit) * unit
