"""Orthonormal vectors with the same bytes on every machine. Pure.

Sums have a fixed order and no fused multiply-add, so that all processors get the same result;
BLAS and LAPACK choose their order by the machine. There are few vectors, so this costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Doubles = np.ndarray[Any, np.dtype[np.float64]]

DEPENDENT = 1e-6  # a vector of which less than this is new is noise of float32 sums


def drawn(seed: Sequence[int], length: int) -> Iterator[Doubles]:
    """Yield vectors of random numbers between -1 and 1.

    Args:
        seed: The numbers that determine the vectors.
        length: The length of each vector.
    """
    bits = np.random.PCG64(np.random.SeedSequence(tuple(seed)))
    while True:
        high_bits = bits.random_raw(length) >> np.uint64(11)
        yield high_bits.astype(np.float64) * 2.0**-52 - 1.0


def orthonormal(rows: Doubles, spare: Iterator[Doubles]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Orthonormalize rows by Gram-Schmidt, run twice, which is enough for full precision.

    Args:
        rows: Finite vectors, at most as many as each has numbers. They are changed.
        spare: Vectors that replace rows which are zero or depend on earlier rows.

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
    """Subtract others' components from a row and normalize it; return False if nothing remains."""
    before = np.abs(row).max(initial=0.0)
    if before == 0.0:
        return False
    row /= before  # so that no square is too small or too large for a double
    length = np.sqrt((row * row).sum())
    for _ in range(2):
        shares = (others * row).sum(axis=1)
        row -= (others * shares[:, None]).sum(axis=0)
    remaining = np.sqrt((row * row).sum())
    if remaining <= DEPENDENT * length:
        return False
    row /= remaining
    return True
