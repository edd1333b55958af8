"""Layers sent as factors or rows: the rows of a host's workers, stacked once."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from slipstream._native import mean_into
from slipstream.codecs import LayerCodec
from slipstream.codecs.matrices import (
    BYTES,
    DTYPES,
    Bytes,
    Matrix,
    Scratch,
    matrix_nbytes,
    quantize,
    stack,
)
from slipstream.codecs.quantized import FEW_BITS
from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.runtime.exchange.channel import LayerChannel
from slipstream.runtime.exchange.send_buffers import Loan
from slipstream.runtime.hosts.memory import HostMemory
from slipstream.types import Layer, Unit

HEADER = struct.Struct("<QBQB")  # rows and a number for the dtype, of two matrices


class HostLayers:
    """The factors and rows that the workers of a host have captured, by layer of a plan."""

    def __init__(self, plan: Plan, memory: HostMemory) -> None:
        self._memory, self._scratch = memory, Scratch()
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
        """Put a worker's two matrices where worker 0 reads them.

        Raises:
            RuntimeFault: The rows are larger than the memory for them.
        """
        place = self._memory.matrices(worker, self._numbers[unit])
        needed = HEADER.size + sum(matrix.data.nbytes for matrix in matrices)
        if needed > len(place):
            raise RuntimeFault(
                f"the rows of layer {self.layer(unit).name!r} take {needed} bytes, and the memory "
                f"of this host has room for {len(place)}: name the layer in poseidon(dense=[...]), "
                "or use poseidon(hierarchical=False)"
            )
        first, second = matrices
        kinds = DTYPES.index(first.dtype), DTYPES.index(second.dtype)
        HEADER.pack_into(place, 0, first.rows, kinds[0], second.rows, kinds[1])
        at = HEADER.size
        for matrix in matrices:
            place[at : at + matrix.data.nbytes] = matrix.data
            at += matrix.data.nbytes

    def read(self, worker: int, unit: int) -> tuple[Matrix, Matrix]:
        """Return the two matrices that ``write`` has put there."""
        place = self._memory.matrices(worker, self._numbers[unit])
        rows, kind, others, other_kind = HEADER.unpack_from(place)
        at, matrices = HEADER.size, []
        wanted = self.codec(unit).matrices(self.layer(unit))
        for count, code, form in zip((rows, others), (kind, other_kind), wanted, strict=True):
            nbytes = count * form.width * BYTES[DTYPES[code]]
            matrices.append(Matrix(count, place[at : at + nbytes], DTYPES[code]))
            at += nbytes
        return matrices[0], matrices[1]

    def stacked(
        self,
        unit: int,
        round_: int,
        own: Sequence[Matrix] | None,
        links: LayerChannel,
        share: float,
    ) -> list[tuple[Matrix, Loan]] | None:
        """Return all rows of the host, in rank order, as they are sent; None if it has none.

        Args:
            own: Worker 0's matrices.
            links: The channel that will send them; it provides the memory.
            share: See ``HostMemory.aggregate``; the second matrix is divided by it.
        """
        layer, board = self.layer(unit), self._memory.board
        by_worker = [] if own is None else [tuple(own)]
        for worker in range(1, len(self._memory.ranks)):
            if board.published(worker, layer.weight, round_):
                by_worker.append(self.read(worker, unit))
        if not by_worker:
            return None
        firsts, seconds = ([matrices[place] for matrices in by_worker] for place in (0, 1))
        return [
            self._encoded(unit, 0, firsts, links, 1.0),
            self._encoded(unit, 1, seconds, links, share),
        ]

    def _encoded(
        self, unit: int, place: int, parts: Sequence[Matrix], links: LayerChannel, divisor: float
    ) -> tuple[Matrix, Loan]:
        """Stack, divide and encode one matrix: it is rounded once, whatever its precision."""
        codec, width = self.codec(unit), self.codec(unit).matrices(self.layer(unit))[place].width
        rows, dtype = sum(part.rows for part in parts), parts[0].dtype
        wire = codec.wire_dtype(dtype, place)
        loan = links.buffer(unit, place, matrix_nbytes(rows * width, wire))
        out = np.asarray(loan.data)
        stacked_as = "float32" if wire in FEW_BITS else dtype  # the type that kernels quantise
        memory: Scratch = Lent(out) if wire == stacked_as else self._scratch
        matrices = [(part.rows, part.dtype, [part.data]) for part in parts]
        whole = stack(matrices, width, stacked_as, memory, place)
        if wire in FEW_BITS:
            if divisor != 1.0 and rows:
                mean_into(whole.data, [whole.data], stacked_as, divisor)
            chance = codec.chance(links.rank, links.step, unit, place)
            quantize(out, whole.data, wire, chance)
        elif rows and (wire != stacked_as or divisor != 1.0):
            mean_into(out, [whole.data], stacked_as, divisor, out_dtype=wire)
        return Matrix(rows, out, wire), loan


class Lent(Scratch):
    """Memory that a channel has lent for a stack."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def take(self, place: int, nbytes: int) -> Bytes:
        return self._data
