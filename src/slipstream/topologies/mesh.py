"""Peer mesh: every worker holds everything and hears from every other worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from slipstream.types import Cluster, Node, Rank


@dataclass(frozen=True, slots=True)
class Mesh:
    """All workers hold each chunk; what a holder works out stays with it."""

    name: ClassVar[str] = "mesh"
    needs_servers: ClassVar[bool] = False
    relays: ClassVar[bool] = False
    whole_layers: ClassVar[bool] = False

    def deal(self, nbytes: Sequence[int], cluster: Cluster) -> tuple[tuple[Node, ...], ...]:
        return (cluster.worker_nodes,) * len(nbytes)

    def fanout(self, node: Node, holder: Node, cluster: Cluster) -> tuple[Node, ...]:
        return ()

    def without(self, rank: Rank) -> Mesh:
        return self
