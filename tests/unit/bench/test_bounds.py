from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.apps.bench.bounds import Shape, dense_bytes, exact_bytes, seconds
from slipstream.apps.bench.comparison import Bounds, Comparison, model_shapes, wire_bounds
from slipstream.apps.bench.trial import Trial
from slipstream.apps.bench.workloads import workload

MATRIX = Shape(1000 * 4096, 4, matrix=(1000, 4096), rows=32)
VECTOR = Shape(1000, 4)

sizes = st.integers(1, 5000)
matrices = st.builds(
    lambda m, n, itemsize, rows: Shape(m * n, itemsize, matrix=(m, n), rows=rows),
    sizes,
    sizes,
    st.sampled_from([2, 4, 8]),
    st.integers(1, 256),
)
vectors = st.builds(Shape, sizes, st.sampled_from([2, 4, 8]))


def test_worked_examples() -> None:
    # Two workers: half of the model out and in again, or one worker's 32 rows of X and dY.
    assert dense_bytes([MATRIX, VECTOR], 2) == 4 * 4_096_000 + 4000
    assert exact_bytes([MATRIX], 2) == 32 * 5096 * 4
    assert exact_bytes([MATRIX, VECTOR], 2) == 32 * 5096 * 4 + 4000
    # Of many workers' rows there are more bytes than in the matrix.
    assert exact_bytes([MATRIX], 64) == dense_bytes([MATRIX], 64) == 2 * 63 / 64 * 16_384_000
    assert dense_bytes([VECTOR], 1) == exact_bytes([MATRIX], 1) == 0


def test_a_link_of_1gbit_takes_a_gigabit_with_its_headers() -> None:
    assert seconds(125e6 * 1448 / 1514, 1e9) == pytest.approx(1.0)


@given(st.lists(st.one_of(matrices, vectors), max_size=8), st.integers(1, 128))
def test_the_exact_bound_never_exceeds_the_dense_one(shapes: list[Shape], workers: int) -> None:
    exact, dense = exact_bytes(shapes, workers), dense_bytes(shapes, workers)
    assert 0 <= exact <= dense * (1 + 1e-12)
    assert dense <= 2 * sum(shape.numel * shape.itemsize for shape in shapes)
    if not any(shape.matrix for shape in shapes):
        assert exact == pytest.approx(dense)


@given(st.lists(matrices, min_size=1, max_size=4), st.integers(1, 64))
def test_more_workers_move_no_less(shapes: list[Shape], workers: int) -> None:
    assert exact_bytes(shapes, workers + 1) >= exact_bytes(shapes, workers)


def test_only_linear_layers_have_a_cheaper_road() -> None:
    shapes = model_shapes(workload("fc"), 16)
    assert [shape.matrix for shape in shapes if shape.matrix] == [
        (2048, 2048),
        (2048, 2048),
        (1000, 2048),
    ]
    assert {shape.rows for shape in shapes} == {16}
    conv = model_shapes(workload("conv"), 2)
    assert sum(shape.numel for shape in conv) == pytest.approx(9.74e6, rel=0.01)
    assert sum(shape.numel for shape in conv if shape.matrix) < 0.01 * 9.74e6


def test_bounds_of_a_comparison() -> None:
    fc = workload("fc")
    shaped = Comparison(trial=Trial(workload="fc"), systems=("local",), workers=4, rate="1gbit")
    bounds = wire_bounds(shaped, fc)
    parameters = sum(p.numel() for p in fc.model().parameters())
    assert bounds.dense_s == pytest.approx(1.5 * 4 * parameters * 8 / 1e9 * 1514 / 1448)
    assert bounds.exact_s is not None
    assert bounds.exact_s < bounds.dense_s
    plain = Comparison(trial=Trial(workload="fc"), systems=("local",))
    assert wire_bounds(plain, fc) == Bounds(None, None)


def test_a_steps_least_is_the_larger_limit() -> None:
    assert Bounds(3.0, 1.0, 2.0).step_s == 2.0
    assert Bounds(3.0, 2.5, 2.0).step_s == 2.5
    assert Bounds(None, None, 2.0).step_s == 2.0
    assert Bounds(None, None).step_s is None
