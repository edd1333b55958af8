"""Orthonormal vectors that are the same bytes on every machine. Pure.

Sums have a fixed order and no fused multiplication, so that processors do not differ: BLAS and
LAPACK choose their order by the machine. The vectors are few, so that this costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Doubles = np.ndarray[Any, np.dtype[np.float64]]

DEPENDENT = 1e-6  # a vector of which less than this is new is noise of float32 sums


def drawn(seed: Sequence[int], length: int) -> Iterator[Doubles]:
    """Vectors of numbers between -1 and 1, one after the other.

    Args:
        seed: Numbers that they follow from.
        length: Of each vector.
    """
    bits = np.random.PCG64(np.random.SeedSequence(tuple(seed)))
    while True:
        high_bits = bits.random_raw(length) >> np.uint64(11)
        yield high_bits.astype(np.float64) * 2.0**-52 - 1.0


def orthonormal(rows: Doubles, spare: Iterator[Doubles]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Gram-Schmidt, twice, which is enough for vectors that are orthogonal to the last digit.

    Args:
        rows: Finite vectors, at most as many as each has numbers. They are changed.
        spare: Where a vector depends on those before it, or is zero, the next of these takes its
            place.

    Returns:
        Vectors with the same span, orthogonal and of length 1.

    >>> orthonormal(np.array([[2.0, 0, 0], [0, 0, 0]]), drawn((1,), 3))[0].tolist()
    [1.0, 0.0, 0.0]
    """
    for number, row in enumerate(rows):
        while not _make_unit(rows[:number], row):
            row[:] = next(spare)
    return rows.astype(np.float32)


def _make_unit(others: Doubles, row: Doubles) -> bool:
    """Take out of a vector what is in others, and make its length 1; False: nothing is left."""
    before = np.abs(row).max(initial=0.0)
    if before == 0.0:
        return False
    row /= before  # so that no square is too small or too large for a double
    length = np.sqrt((row * row).sum())
    for _ in range(2):
        shares = (others * row).sum(axis=1)
        row -= (others * shares[:, None]).sum(axis=0)
    left = np.sqrt((row * row).sum())
    if left <= DEPENDENT * length:
        return False
    row /= left
    return True
