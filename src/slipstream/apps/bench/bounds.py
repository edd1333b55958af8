"""Lower bounds for any system: the bytes of an exact exchange, over the link's rate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FRAME_PAYLOAD = 1448 / 1514  # the share of TCP's payload in a frame on the wire


@dataclass(frozen=True, slots=True)
class Shape:
    """A parameter tensor; ``rows`` is the number of (X, dY) rows of a worker's batch, if it is a
    matrix whose gradient is dYᵀX."""

    numel: int
    itemsize: int
    matrix: tuple[int, int] | None = None
    rows: int = 0


def dense_bytes(shapes: Iterable[Shape], workers: int) -> float:
    """Return 2(n−1)/n of the model: a link's bytes, each way, in any exact dense exchange."""
    return 2 * (workers - 1) / workers * sum(s.numel * s.itemsize for s in shapes)


def exact_bytes(shapes: Iterable[Shape], workers: int) -> float:
    """Return the same if matrices may be sent as factors instead: (n−1)·K·(M+N) each."""
    total = 0.0
    for shape in shapes:
        dense = dense_bytes([shape], workers)
        if shape.matrix is None:
            total += dense
        else:
            factors = (workers - 1) * shape.rows * sum(shape.matrix) * shape.itemsize
            total += min(dense, factors)
    return total


def seconds(nbytes: float, bits_per_second: float) -> float:
    """Return the time of a link for a payload, including the headers of frames."""
    return nbytes * 8 / (bits_per_second * FRAME_PAYLOAD)
