"""Layers in compact form in a simulation: the workers' matrices, and the maths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.codecs import LayerCodec
from slipstream.codecs.matrices import Matrix, matrix_nbytes, quantize
from slipstream.codecs.quantized import FEW_BITS
from slipstream.plan import Plan
from slipstream.runtime.exchange.aggregator import LayerGradients
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.exchange.send_buffers import Loan
from slipstream.testing.members import ByteSlots
from slipstream.types import Layer, Unit, Values

MOST_ROWS = 3


@dataclass(frozen=True)
class LayerRows:
    """One worker's matrices of a layer: X and dY, or ids and values."""

    first: np.ndarray[Any, Any]
    second: np.ndarray[Any, Any]


Rows = Callable[[int, int, Unit], LayerRows | None]  # rank, round, unit; None: it was not used


def whole_numbers(seed: int) -> Rows:
    """Return small integers, whose sums and products are exact; each worker has its own rows."""

    def rows(rank: int, round_: int, unit: Unit) -> LayerRows | None:
        layer = unit.layer
        assert layer is not None
        numbers = np.random.default_rng((seed, rank, round_, unit.index))
        count = int(numbers.integers(1, MOST_ROWS + 1))
        inputs, outputs = layer.inputs, layer.outputs
        if layer.form == "rows":
            ids = numbers.choice(outputs, size=(count, 1), replace=False).astype(np.int64)
            return LayerRows(ids, whole(numbers, count, inputs, layer.dtype))
        x = whole(numbers, count, inputs, layer.dtype)
        return LayerRows(x, whole(numbers, count, outputs, layer.dtype))

    return rows


def whole(numbers: np.random.Generator, rows: int, columns: int, dtype: str) -> Any:
    return numbers.integers(-4, 5, size=(rows, columns)).astype(dtype)


def dense(plan: Plan, layer: Layer, rows: LayerRows) -> dict[int, bytes]:
    """Return the gradient of a worker's matrices, by tensor."""
    gradients, count = LayerGradients(plan), len(rows.first)
    first, second = raw(rows.first), raw(rows.second)
    if layer.form == "rows":
        gradients.add_rows(layer, Values(first, "int64"), Values(second, layer.dtype), count, 1.0)
    else:
        matrices = Values(second, layer.dtype), Values(first, layer.dtype)
        gradients.multiply(layer, *matrices, count, 1.0)
    return {tensor: values.data.tobytes() for tensor, values in gradients.flat.items()}


def raw(matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.ascontiguousarray(matrix).reshape(-1).view(np.uint8)


def send(channel: RoundChannel, unit: Unit, rows: LayerRows | None, *, early: bool) -> None:
    """Send a layer as a worker does: X during forward if ``early``, the rest after backward."""
    if rows is None:
        channel.ready_layer(unit.index, None)
        return
    first, second = (held(channel, unit, m, p) for p, m in enumerate((rows.first, rows.second)))
    if early:
        channel.early(unit.index, *first)
        channel.ready_layer(unit.index, [second], early=True)
    else:
        channel.ready_layer(unit.index, [first, second])


def held(
    channel: RoundChannel, unit: Unit, matrix: np.ndarray[Any, Any], place: int
) -> tuple[Matrix, Loan]:
    content, codec, dtype = raw(matrix), channel.plan.route(unit).up, matrix.dtype.name
    assert isinstance(codec, LayerCodec)
    if codec.wire_dtype(dtype, place) in FEW_BITS:
        dtype = codec.wire_dtype(dtype, place)
    loan = channel.buffer(unit.index, place, matrix_nbytes(matrix.size, dtype))
    if dtype in FEW_BITS:
        seed = codec.chance(channel.rank, channel.step, unit.index, place)
        quantize(loan.data, content, dtype, seed)
    else:
        loan.data[:] = content
    return Matrix(len(matrix), loan.data, dtype), loan


class ByteLayers:
    """A writer of layers' gradients into a worker's tensors; implements ``LayerMath`` in numpy."""

    def __init__(self, plan: Plan, slots: ByteSlots) -> None:
        self._plan, self._slots = plan, slots

    def multiply(self, layer: Layer, dy: Values, x: Values, rows: int, share: float) -> None:
        gradients = LayerGradients(self._plan)
        gradients.multiply(layer, dy, x, rows, share)
        self._write(gradients)

    def add_rows(self, layer: Layer, ids: Values, values: Values, rows: int, share: float) -> None:
        gradients = LayerGradients(self._plan)
        gradients.add_rows(layer, ids, values, rows, share)
        self._write(gradients)

    def _write(self, gradients: LayerGradients) -> None:
        for tensor, values in gradients.flat.items():
            self._slots.sink(tensor).data[:] = values.data
            self._slots.finish(tensor)
