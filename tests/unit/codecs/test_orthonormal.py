"""Vectors of length 1 at right angles, whatever they were made from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.codecs.orthonormal import drawn, orthonormal


def check_orthonormal(vectors: np.ndarray) -> None:
    products = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    np.testing.assert_allclose(products, np.eye(len(vectors)), atol=1e-6)


@given(st.integers(1, 8), st.integers(8, 60), st.integers(0, 99), st.floats(-60, 60))
def test_vectors_keep_their_span(count: int, length: int, seed: int, magnitude: float) -> None:
    given_ = np.random.default_rng(seed).normal(size=(count, length)) * 10.0**magnitude
    found = orthonormal(given_.copy(), drawn((seed,), length))
    check_orthonormal(found)
    units = given_ / np.linalg.norm(given_, axis=1, keepdims=True)
    np.testing.assert_allclose(units @ found.T.astype(np.float64) @ found, units, atol=1e-5)


@pytest.mark.parametrize(
    "rows",
    [np.zeros((3, 5)), np.ones((3, 5)), np.eye(3, 5) * [[1], [0], [1]], np.full((3, 5), 5e-324)],
)
def test_vectors_that_are_zero_or_depend_on_others_are_replaced(rows: np.ndarray) -> None:
    check_orthonormal(orthonormal(rows.copy(), drawn((7, 1), 5)))


def test_float32_noise_is_no_direction() -> None:
    one = np.random.default_rng(1).normal(size=40)
    noisy = np.float32([one, one / 3, one * 7]).astype(np.float64)
    found = orthonormal(noisy.copy(), drawn((1,), 40))
    again = orthonormal(np.vstack([noisy[:1], np.zeros((2, 40))]), drawn((1,), 40))
    np.testing.assert_array_equal(found, again)


def test_what_is_drawn_follows_from_the_seed_alone_and_for_ever() -> None:
    vectors = drawn((3, 1), 3)
    first, second = next(vectors), next(vectors)
    assert first.tolist() == next(drawn((3, 1), 3)).tolist()
    assert len({*first, *second, *next(drawn((3, 2), 3))}) == 9
    # The same on every machine and with every version of numpy, or workers would differ.
    assert first.tolist() == [-0.49349384429947074, -0.18560561743601034, -0.3172648359217529]
