"""Rows of a host's workers, stacked; and what comes of them, added to what workers have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.codecs.matrices import Matrix
from slipstream.errors import RuntimeFault
from slipstream.planning.host_segment import HostSegment
from slipstream.runtime.exchange.send_buffers import SendBuffers
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


@pytest.fixture
def layers() -> Any:
    shapes = [unit.layer for unit in PLAN.units if unit.layer is not None]
    shared = SharedMemory.create(HostSegment.of(PLAN.specs, 3, shapes).nbytes)
    memory = HostMemory(PLAN.specs, RANKS, shared, shapes)
    yield HostLayers(PLAN, memory)
    memory.close()


def matrix(rows: int, width: int, seed: int, dtype: str = "float32") -> Matrix:
    values = np.random.default_rng(seed).integers(0, 9, (rows, width)).astype(dtype)
    return Matrix(rows, values.reshape(-1).view(np.uint8), dtype)


def follower(layers: Any, worker: int, add: Any = None) -> HostFollower:
    member: Any = SimpleNamespace(round=0, check=lambda: None, last_refusal="")
    slots: Any = SimpleNamespace(source=lambda tensor: None)
    return HostFollower(worker, layers._memory, slots, member, 0.2, layers, add or print)


def lend() -> Any:
    buffers = SendBuffers()
    return lambda unit, place, nbytes: buffers.take((unit, place), nbytes)


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
        follower(layers, worker).ready_layer(unit, [(m, lend()(0, 0, 1)) for m in given[worker]])
    stacked = layers.stacked(unit, 0, given[0], lend(), 2.0)
    for place, (found, loan) in enumerate(stacked):
        wanted = np.concatenate([numbers(each[place], widths[place]) for each in given])
        np.testing.assert_array_equal(
            numbers(found, widths[place]), wanted / 2.0 if place else wanted
        )
        assert found.rows == 7
        assert loan.needed


def test_workers_that_did_not_use_a_layer_have_no_rows_in_it(layers: Any) -> None:
    for worker in (1, 2):
        follower(layers, worker).ready_layer(FC, None)
    assert layers.stacked(FC, 0, None, lend(), 2.0) is None
    own = [matrix(3, 5, 1), matrix(3, 6, 2)]
    (first, _), _ = layers.stacked(FC, 0, own, lend(), 1.0)
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
    with pytest.raises(RuntimeFault, match=r"layer 'fc' take .* poseidon\(hosts='flat'\)"):
        layers.write(1, FC, many)


def test_a_layer_that_is_captured_twice_is_refused(layers: Any) -> None:
    one = follower(layers, 1)
    one.ready_layer(FC, None)
    with pytest.raises(RuntimeFault, match="'fc' was completed twice"):
        one.ready_layer(FC, None)
