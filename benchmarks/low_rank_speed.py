"""How fast matrices are multiplied with a basis and made again on one thread, beside BLAS.

python benchmarks/low_rank_speed.py --json low_rank_speed.json

Speeds are GB/s of fp32, of the gradient or of the result. Of BLAS (numpy's) they are those of the
same arithmetic, which takes more passes over memory: set OPENBLAS_NUM_THREADS=1 for one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from filter_speed import Figure, best_s, report

from slipstream._native import low_rank_pack, low_rank_unpack

RANKS = (4, 16)


def measure(numel: int, budget_s: float) -> Iterator[Figure]:
    def speed(task: Callable[[], object]) -> float:
        return 4 * numel / best_s(task, budget_s) / 1e9

    rows = 1 << (numel.bit_length() // 2)
    columns = numel // rows
    numbers = np.random.default_rng(0)
    gradient = numbers.normal(size=(rows, columns)).astype(np.float32)
    residual, out = np.zeros_like(gradient), np.empty_like(gradient)
    for rank in RANKS:
        u, v = (np.linalg.qr(numbers.normal(size=(n, rank)))[0].T for n in (rows, columns))
        u, v = np.ascontiguousarray(u, np.float32), np.ascontiguousarray(v, np.float32)
        for side, factor, basis, left in (
            ("right", u.copy(), v, False),
            ("left", v.copy(), u, True),
        ):
            rate = speed(
                lambda: low_rank_pack(factor, gradient, residual, basis, rows, rank, left)  # noqa: B023
            )
            smaller = numel / factor.size
            yield Figure(numel, "pack", f"kernel, rank {rank}, {side} side", rate, smaller)
        yield Figure(numel, "pack", f"BLAS, rank {rank}", speed(by_blas(gradient, residual, v)))
        rate = speed(lambda: low_rank_unpack(out, u, v, rows, rank))  # noqa: B023
        yield Figure(numel, "unpack", f"kernel, rank {rank}", rate)
        rate = speed(lambda: np.matmul(u.T, v, out=out))  # noqa: B023
        yield Figure(numel, "unpack", f"BLAS, rank {rank}", rate)


def by_blas(gradient: np.ndarray, residual: np.ndarray, basis: np.ndarray) -> Callable[[], object]:
    """The sum, its product, and what that leaves, by numpy."""

    def packing() -> object:
        np.add(residual, gradient, out=residual)
        factor = residual @ basis.T
        np.subtract(residual, factor @ basis, out=residual)
        return factor

    return packing


if __name__ == "__main__":
    report(__doc__.splitlines()[0], measure)
