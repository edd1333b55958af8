"""Rows of a host's workers, stacked; and what comes of them, added to what workers have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream._native import mean_into
from slipstream.codecs.matrices import Matrix, decoded_values
from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.planning.host_segment import HostSegment
from slipstream.runtime.exchange.send_buffers import Loan, SendBuffers
from slipstream.runtime.hosts.follower import HostFollower
from slipstream.runtime.hosts.layers import HostLayers
from slipstream.runtime.hosts.memory import HostMemory
from slipstream.systems import poseidon
from slipstream.transports.shared_memory import SharedMemory
from slipstream.types import Cluster, Spec, Values

SPECS = (
    Spec("fc.weight", (6, 5), "float32", 0, layer="fc", form="factors"),
    Spec("fc.bias", (6,), "float32", 1, layer="fc", form="factors"),
    Spec("table.weight", (9, 3), "float32", 2, layer="table", form="rows"),
)
RANKS = (0, 1, 2)
PLAN = poseidon(choose="bytes").plan(SPECS, Cluster(2, 1, members=(RANKS, (3,))))
FC, TABLE = (u.index for u in PLAN.units if u.layer is not None)


def layers_of(plan: Plan) -> HostLayers:
    shapes = [unit.layer for unit in plan.units if unit.layer is not None]
    shared = SharedMemory.create(HostSegment.of(plan.specs, 3, shapes).nbytes)
    return HostLayers(plan, HostMemory(plan.specs, RANKS, shared, shapes))


@pytest.fixture
def layers() -> Any:
    made = layers_of(PLAN)
    yield made
    made._memory.close()


def matrix(rows: int, width: int, seed: int, dtype: str = "float32") -> Matrix:
    values = np.random.default_rng(seed).integers(0, 9, (rows, width)).astype(dtype)
    return Matrix(rows, values.reshape(-1).view(np.uint8), dtype)


def follower(layers: Any, worker: int, add: Any = None) -> HostFollower:
    member: Any = SimpleNamespace(round=0, check=lambda: None, last_refusal="")
    slots: Any = SimpleNamespace(source=lambda tensor: None)
    return HostFollower(worker, layers._memory, slots, member, 0.2, layers, add or print)


def links() -> Any:
    """As much of a ``LayerChannel`` as rows need."""
    buffers = SendBuffers()

    def buffer(unit: int, place: int, nbytes: int) -> Loan:
        return buffers.take((unit, place), nbytes)

    return SimpleNamespace(rank=1, step=3, buffer=buffer)


def numbers(found: Matrix, width: int) -> np.ndarray[Any, Any]:
    return found.data.view(found.dtype).reshape(found.rows, width)


@pytest.mark.parametrize(("unit", "widths"), [(FC, (5, 6)), (TABLE, (1, 3))])
def test_rows_are_stacked_in_rank_order_and_the_second_matrix_is_divided(
    layers: Any, unit: int, widths: tuple[int, int]
) -> None:
    kinds = ("float32", "float32") if unit == FC else ("int64", "float32")
    given = [
        [
            matrix(rows, w, 10 * rows + p, k)
            for p, (w, k) in enumerate(zip(widths, kinds, strict=True))
        ]
        for rows in (2, 1, 4)
    ]
    for worker in (1, 2):
        follower(layers, worker).ready_layer(
            unit, [(m, links().buffer(0, 0, 1)) for m in given[worker]]
        )
    stacked = layers.stacked(unit, 0, given[0], links(), 2.0)
    for place, (found, loan) in enumerate(stacked):
        wanted = np.concatenate([numbers(each[place], widths[place]) for each in given])
        np.testing.assert_array_equal(
            numbers(found, widths[place]), wanted / 2.0 if place else wanted
        )
        assert found.rows == 7
        assert loan.needed


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_rows_are_rounded_once_together(wire: Any) -> None:
    """Workers give them exact; a third of what is in bfloat16 would be rounded a second time."""
    plan = poseidon(choose="bytes", wire=wire).plan(SPECS, Cluster(2, 1, members=(RANKS, (3,))))
    layers, random = layers_of(plan), np.random.default_rng(1)
    given = [random.normal(size=(2, width)).astype(np.float32) for width in (5, 6)]
    rows = [Matrix(2, values.reshape(-1).view(np.uint8), "float32") for values in given]
    for worker in (1, 2):
        follower(layers, worker).ready_layer(FC, [(m, links().buffer(0, 0, 1)) for m in rows])
    stacked = layers.stacked(FC, 0, rows, links(), 3.0)
    assert stacked is not None
    for place, ((found, _), values) in enumerate(zip(stacked, given, strict=True)):
        assert (found.rows, found.dtype) == (6, wire)
        wanted = np.concatenate([values] * 3) / np.float32(3.0 if place else 1.0)
        decoded = decode(found, wanted.size).reshape(wanted.shape)
        if wire == "bfloat16":
            np.testing.assert_array_equal(decoded, torch.from_numpy(wanted).bfloat16().float())
        assert np.abs(decoded - wanted).max() <= np.abs(wanted).max() / 100
    layers._memory.close()


def decode(found: Matrix, numel: int) -> np.ndarray[Any, Any]:
    values = Values.empty(numel, "float32")
    restored = decoded_values(numel, found.dtype, [found.data])
    mean_into(values.data, [restored.data], restored.dtype, 1.0, out_dtype="float32")
    return values.data.view(np.float32)


def test_workers_that_did_not_use_a_layer_have_no_rows_in_it(layers: Any) -> None:
    for worker in (1, 2):
        follower(layers, worker).ready_layer(FC, None)
    assert layers.stacked(FC, 0, None, links(), 2.0) is None
    own = [matrix(3, 5, 1), matrix(3, 6, 2)]
    (first, _), _ = layers.stacked(FC, 0, own, links(), 1.0)
    np.testing.assert_array_equal(numbers(first, 5), numbers(own[0], 5))


def test_a_layers_result_is_added_and_another_tensors_is_copied(layers: Any) -> None:
    told: list[tuple[int, list[float]]] = []

    def add(tensor: int, values: Values) -> None:
        told.append((tensor, values.data.view("float32")[:2].tolist()))

    one = follower(layers, 1, add)
    one.travel_compact({FC})
    one.skip_round({0, 1})
    one.flush()
    layers._memory.place(0, 0).data.view("float32")[:] = 3.0
    for tensor, present in ((0, True), (1, False), (2, False)):
        layers._memory.board.publish_result(tensor, 0, present)
    one.wait()
    assert told == [(0, [3.0, 3.0])]


def test_more_rows_than_there_is_room_for_are_refused_with_a_way_out(layers: Any) -> None:
    many = [matrix(40_000, 5, 1), matrix(40_000, 6, 2)]
    with pytest.raises(RuntimeFault, match=r"layer 'fc' take .* poseidon\(hierarchical=False\)"):
        layers.write(1, FC, many)


def test_a_layer_that_is_captured_twice_is_refused(layers: Any) -> None:
    one = follower(layers, 1)
    one.ready_layer(FC, None)
    with pytest.raises(RuntimeFault, match="'fc' was completed twice"):
        one.ready_layer(FC, None)
