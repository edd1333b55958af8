"""The cost of a layer's gradient on each route: Poseidon's Table 1, and predicted time.

Symbols of the paper: a layer's matrix is M × N, K rows in a worker's batch, P1 workers, P2 servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The compact form of a layer's gradient. "factors": dYᵀX of a fully connected layer, M outputs and
# N inputs; "rows": the used rows of an embedding, M rows of N values.
Form = Literal["factors", "rows"]
ID_BYTES = 8
# Dense tensors share messages; a layer's rows are a separate message to every peer.
MESSAGE_S = 50e-6


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A layer whose gradient has a compact form; M × N as above, and a bias of M values or none."""

    name: str
    form: Form
    outputs: int
    inputs: int
    bias: bool = False
    item_bytes: int = 4

    @property
    def dense_bytes(self) -> int:
        return (self.outputs * self.inputs + self.outputs * self.bias) * self.item_bytes

    def compact_bytes(self, rows: float) -> float:
        """Return the bytes of one worker's compact gradient, in its own precision."""
        if self.form == "rows":
            return rows * (self.inputs * self.item_bytes + ID_BYTES)
        return rows * (self.outputs + self.inputs) * self.item_bytes

    def rebuild_flops(self, rows: float) -> float:
        """Return the flops to compute the dense gradient from so many rows; 0 for a table."""
        return 0.0 if self.form == "rows" else 2.0 * rows * self.outputs * self.inputs


# ---- Table 1: floats that a node sends and receives


def ps_server(m: int, n: int, p1: int, p2: int) -> float:
    return 2 * p1 * m * n / p2


def ps_worker(m: int, n: int) -> float:
    return 2 * m * n


def ps_both(m: int, n: int, p1: int, p2: int) -> float:
    """Return the floats of a node that is both worker and server."""
    return 2 * m * n * (p1 + p2 - 2) / p2


def sfb(m: int, n: int, k: int, p1: int) -> float:
    return 2 * k * (p1 - 1) * (m + n)


def adam_server(m: int, n: int, k: int, p1: int) -> float:
    """Return the busiest server's floats: factors in from every worker, the matrix out to each."""
    return p1 * m * n + p1 * k * (m + n)


def adam_worker(m: int, n: int, k: int) -> float:
    return k * (m + n) + m * n


def adam_both(m: int, n: int, k: int, p1: int) -> float:
    return (p1 - 1) * (m * n + k * m + k * n)


def best_scheme(m: int, n: int, k: int, p1: int, p2: int) -> Literal["SFB", "PS"]:
    """Choose the form of a fully connected layer's gradient by Algorithm 1."""
    return "SFB" if sfb(m, n, k, p1) <= ps_both(m, n, p1, p2) else "PS"


# ---- time


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured or given speeds: a link each way, one worker's GEMM, one server's summing."""

    link_bits_per_s: float
    gemm_flops_per_s: float
    server_bytes_per_s: float


def dense_link_bytes(nbytes: float, workers: int, servers: int, *, dedicated: bool) -> float:
    """Return the busiest link's bytes, each way, for a dense tensor.

    Without servers: a ring. With colocated servers: their shard's traffic in addition to the
    workers' own. With dedicated servers: the busier of a worker's and a server's link.
    """
    if not servers:
        return 2 * (workers - 1) / workers * nbytes
    if dedicated:
        return max(1.0, workers / servers) * nbytes
    return (workers + servers - 2) / servers * nbytes


def compact_seconds(
    shape: LayerShape, rows: float, workers: int, speeds: Speeds, compact_bytes: float
) -> float:
    """Return the time to send to all peers, and to compute with the other ranks' rows."""
    link = (workers - 1) * compact_bytes
    extra = shape.rebuild_flops(rows * (workers - 1))
    messages = (workers - 1) * MESSAGE_S
    return link * 8 / speeds.link_bits_per_s + extra / speeds.gemm_flops_per_s + messages
