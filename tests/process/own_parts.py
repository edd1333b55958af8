"""Parts of a user's own, one of each kind, which do what slipstream's own do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from slipstream.codecs import Form
from slipstream.codecs.protocol import check_nbytes
from slipstream.consistency.admission import Admission
from slipstream.consistency.ledgers import AllLedger
from slipstream.outer_optimizers import At, OuterOptimizer, State, zeros_like
from slipstream.parts import Facts, Part, facts
from slipstream.topologies import Topology
from slipstream.types import Buffer, Cluster, EncodeContext, Node, Spec, Values


class Plain(Part, frozen=True):
    """Values as they are."""

    name: ClassVar[str] = "plain"
    form: ClassVar[Form] = "dense"
    lossy: ClassVar[bool] = False
    splits: ClassVar[bool] = True
    frames: ClassVar[int] = 1

    def facts(self) -> Facts:
        return facts("up: dense")

    def obstacle(self, spec: Spec) -> str:
        return "" if spec.dtype == "float64" else f"{spec.name}: float64 only"

    def wire_bytes(self, spec: Spec, workers: int, rows: int = 0) -> float:
        return spec.nbytes

    def init(self, numel: int, dtype: str) -> None:
        return None

    def encode(self, values: Values, residual: Any, ctx: EncodeContext) -> tuple[Buffer, ...]:
        return (values.data.copy(),)

    def examine(self, frames: Sequence[Buffer], numel: int, dtype: str) -> None:
        check_nbytes(frames[0], numel, 8 * numel)

    def combine(
        self, contributions: Sequence[Sequence[Buffer]], out: Values, *, divisor: float
    ) -> None:
        total = sum(np.frombuffer(frames[0], np.float64) for frames in contributions)
        out.data.view(np.float64)[:] = total / divisor

    def decode_into(self, frames: Sequence[Buffer], out: Values) -> None:
        out.data[:] = np.frombuffer(frames[0], np.uint8)


class OnOne(Topology, frozen=True):
    """One server holds everything."""

    server: int = 0

    name: ClassVar[str] = "on-one"
    whole_layers: ClassVar[bool] = False

    def facts(self) -> Facts:
        return facts("servers hold")

    def deal(self, nbytes: Sequence[int], cluster: Cluster) -> tuple[tuple[Node, ...], ...]:
        return tuple((cluster.server_nodes[self.server],) for _ in nbytes)

    def fanout(self, node: Node, holder: Node, cluster: Cluster) -> tuple[Node, ...]:
        return cluster.worker_nodes if node == holder else ()


class Everybody(Admission, frozen=True):
    """A round needs every worker."""

    def facts(self) -> Facts:
        return facts("rounds of all workers")

    def ledger(self, workers: int, ahead: int) -> AllLedger:
        return AllLedger(set(range(workers)), ahead=ahead)

    def follows(self, *, seen: int, begun: int, result: int) -> bool:
        return seen == result < begun


class Backwards(Part, frozen=True):
    """After the backward pass, its last tensor first."""

    leaves_during_backward: ClassVar[bool] = False

    def priority(self, *, forward_order: int, backward_order: int) -> int:
        return -backward_order


class Heavy(OuterOptimizer, frozen=True):
    """Momentum over outer rounds: v ← μ v + Δ; θ ← θ − η v."""

    lr: float = 0.5
    momentum: float = 0.5
    at: At = "server"

    def init(self, theta: Any) -> State:
        return {"v": zeros_like(theta)}

    def update(self, theta: Any, gradient: Any, state: State) -> None:
        state["v"] = state["v"] * self.momentum + gradient
        theta -= state["v"] * self.lr
