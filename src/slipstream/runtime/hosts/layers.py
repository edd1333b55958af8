"""Layers whose gradients travel as factors or rows: the rows of a host's workers, stacked once."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from slipstream._native import mean_into
from slipstream.codecs import LayerCodec
from slipstream.codecs.matrices import BYTES, DTYPES, Bytes, Matrix, stack
from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.runtime.exchange.send_buffers import Loan
from slipstream.runtime.hosts.memory import HostMemory
from slipstream.types import Layer, Unit

Buffer = Callable[[int, int, int], Loan]  # the unit, which of its matrices, and bytes
HEADER = struct.Struct("<QBQB")  # rows and a number for the dtype, of two matrices


class HostLayers:
    """What the workers of a host have captured of a plan's layers."""

    def __init__(self, plan: Plan, memory: HostMemory) -> None:
        self._memory = memory
        self.units: Mapping[int, Unit] = {
            unit.index: unit for unit in plan.units if unit.layer is not None
        }
        self._codecs = {index: plan.route(unit).up for index, unit in self.units.items()}
        self._numbers = {index: number for number, index in enumerate(self.units)}
        self.unit_of = {t: index for index, unit in self.units.items() for t in unit.tensors}

    def layer(self, unit: int) -> Layer:
        layer = self.units[unit].layer
        assert layer is not None
        return layer

    def codec(self, unit: int) -> LayerCodec:
        codec = self._codecs[unit]
        assert isinstance(codec, LayerCodec)
        return codec

    def write(self, worker: int, unit: int, matrices: Sequence[Matrix]) -> None:
        """Put a worker's two matrices where worker 0 finds them.

        Raises:
            RuntimeFault: There are more rows than there is room for.
        """
        place = self._memory.matrices(worker, self._numbers[unit])
        needed = HEADER.size + sum(matrix.data.nbytes for matrix in matrices)
        if needed > len(place):
            raise RuntimeFault(
                f"the rows of layer {self.layer(unit).name!r} take {needed} bytes, and the memory "
                f"of this host has room for {len(place)}: name the layer in poseidon(dense=[...]), "
                "or use poseidon(hosts='flat')"
            )
        first, second = matrices
        kinds = DTYPES.index(first.dtype), DTYPES.index(second.dtype)
        HEADER.pack_into(place, 0, first.rows, kinds[0], second.rows, kinds[1])
        at = HEADER.size
        for matrix in matrices:
            place[at : at + matrix.data.nbytes] = matrix.data
            at += matrix.data.nbytes

    def read(self, worker: int, unit: int) -> tuple[Matrix, Matrix]:
        """What ``write`` has put there."""
        place = self._memory.matrices(worker, self._numbers[unit])
        rows, kind, others, other_kind = HEADER.unpack_from(place)
        at, found = HEADER.size, []
        wanted = self.codec(unit).matrices(self.layer(unit))
        for count, code, form in zip((rows, others), (kind, other_kind), wanted, strict=True):
            nbytes = count * form.width * BYTES[DTYPES[code]]
            found.append(Matrix(count, place[at : at + nbytes], DTYPES[code]))
            at += nbytes
        return found[0], found[1]

    def stacked(
        self,
        unit: int,
        round_: int,
        own: Sequence[Matrix] | None,
        buffer: Buffer,
        share: float,
    ) -> list[tuple[Matrix, Loan]] | None:
        """All rows of the host, in rank order; None if it has none.

        Args:
            own: Worker 0's matrices.
            buffer: Lends memory for one of them.
            share: See ``HostMemory.aggregate``; the second matrix is divided by it.
        """
        layer, board = self.layer(unit), self._memory.board
        given = [] if own is None else [tuple(own)]
        for worker in range(1, len(self._memory.ranks)):
            if board.published(worker, layer.weight, round_):
                given.append(self.read(worker, unit))
        if not given:
            return None
        found = []
        for place, wanted in enumerate(self.codec(unit).matrices(layer)):
            parts = [matrices[place] for matrices in given]
            dtype = parts[0].dtype
            lent = Lent(unit, buffer)
            told = [(part.rows, part.dtype, [part.data]) for part in parts]
            whole = stack(told, wanted.width, dtype, lent, place)  # type: ignore[arg-type]
            if place and whole.data.nbytes:
                mean_into(whole.data, [whole.data], dtype, share)
            found.append((Matrix(sum(p.rows for p in parts), whole.data, dtype), lent.loan))
        return found


class Lent:
    """Memory for a stack that a channel lends; stands for ``Scratch``."""

    loan: Loan

    def __init__(self, unit: int, buffer: Buffer) -> None:
        self._unit, self._buffer = unit, buffer

    def take(self, place: int, nbytes: int) -> Bytes:
        self.loan = self._buffer(self._unit, place, nbytes)
        return np.asarray(self.loan.data)
