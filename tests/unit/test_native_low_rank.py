"""The kernels of low rank against numpy, and what they refuse."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream._native import low_rank_pack, low_rank_unpack

Array = np.ndarray[Any, Any]


def floats(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def in_order(u: Array, v: Array) -> Array:
    """One product after the other, each rounded."""
    out = np.zeros((u.shape[1], v.shape[1]), np.float32)
    for column, row in zip(u, v, strict=True):
        out = out + column[:, None] * row[None, :]
    return out


@given(st.integers(1, 40), st.integers(1, 1500), st.integers(1, 11), st.integers(0, 99))
def test_unpacking_adds_products_in_order_to_the_last_bit(
    rows: int, columns: int, rank: int, seed: int
) -> None:
    rank = min(rank, rows * columns)
    u, v = floats((rank, rows), seed), floats((rank, columns), seed + 1)
    out = np.full((rows, columns), 9, np.float32)
    low_rank_unpack(out, u, v, rows, rank)
    np.testing.assert_array_equal(out, in_order(u, v))


@given(
    st.integers(1, 600),
    st.integers(1, 40) | st.integers(1000, 1100),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 99),
)
def test_packing_multiplies_and_keeps_the_rest(
    rows: int, columns: int, rank: int, left: bool, seed: int
) -> None:
    rank = min(rank, rows * columns)
    gradient, residual = floats((rows, columns), seed), floats((rows, columns), seed + 1)
    basis = floats((rank, rows if left else columns), seed + 2)
    factor = np.empty((rank, columns if left else rows), np.float32)
    total, before = gradient + residual, gradient.copy()
    low_rank_pack(factor, gradient, residual, basis, rows, rank, left)
    exact = total.astype(np.float64).T if left else total.astype(np.float64)
    np.testing.assert_allclose(factor.T, exact @ basis.T, rtol=1e-4, atol=1e-3)
    u, v = (basis, factor) if left else (factor, basis)
    np.testing.assert_array_equal(residual, total - in_order(u, v))
    np.testing.assert_array_equal(gradient, before)


def test_every_nan_is_the_same_one() -> None:
    u = np.uint32([0xFFC00001, 0x3F800000]).view(np.float32).reshape(1, 2)
    out = np.empty((2, 3), np.float32)
    low_rank_unpack(out, u, np.ones((1, 3), np.float32), 2, 1)
    assert out.view(np.uint32)[0].tolist() == [0x7FC00000] * 3
    assert out[1].tolist() == [1, 1, 1]


def test_vectors_may_be_anywhere() -> None:
    """What comes from a link is not aligned."""
    u, v = floats((2, 3), 1), floats((2, 4), 2)
    out, apart = np.empty((3, 4), np.float32), np.empty((3, 4), np.float32)
    low_rank_unpack(out, u, v, 3, 2)
    low_rank_unpack(apart, memoryview(b"x" + u.tobytes())[1:], v, 3, 2)
    np.testing.assert_array_equal(out, apart)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": 0}, "no matrix of 0 rows"),
        ({"rows": 5}, "no matrix of 5 rows"),
        ({"rank": 0}, "rank"),
        ({"rank": 3}, "float32 are needed"),
        ({"left": True}, "float32 are needed"),
        ({"residual": np.zeros(11, np.float32)}, "residual has 44 bytes"),
        ({"basis": np.zeros(7, np.float32)}, "basis has 28 bytes"),
        ({"factor": np.zeros(6, np.float32)[::2]}, "factor must be"),
        ({"residual": np.zeros(49, np.uint8)[1:]}, "aligned"),
    ],
)
def test_packing_refuses_what_does_not_fit(change: dict[str, Any], why: str) -> None:
    fitting: dict[str, Any] = {
        "factor": np.zeros(6, np.float32),
        "gradient": np.zeros(12, np.float32),
        "residual": np.zeros(12, np.float32),
        "basis": np.zeros(8, np.float32),
        "rows": 3,
        "rank": 2,
        "left": False,
    }
    low_rank_pack(**fitting)
    with pytest.raises(ValueError, match=why):
        low_rank_pack(**{**fitting, **change})


def test_packing_refuses_memory_that_overlaps() -> None:
    one = np.zeros(12, np.float32)
    with pytest.raises(ValueError, match="overlap"):
        low_rank_pack(np.zeros(3, np.float32), one, one, np.zeros(4, np.float32), 3, 1, False)


def test_unpacking_refuses_what_does_not_fit() -> None:
    out, u, v = (np.zeros(n, np.float32) for n in (12, 3, 4))
    for arguments in ((out, v, u, 3, 1), (out, u, v, 4, 1), (out, u, v, 3, 2), (out, u, v, 3, 0)):
        with pytest.raises(ValueError, match=r"needed|rank"):
            low_rank_unpack(*arguments)
