"""Peer mesh: every worker holds every chunk and receives from every other worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from slipstream.parts import Facts, facts
from slipstream.topologies.protocol import Topology
from slipstream.types import Cluster, Node


class Mesh(Topology, frozen=True):
    """A topology in which all workers hold each chunk; a holder's result is not sent.

    >>> Mesh().deal([100], Cluster(workers=3))
    ((0, 1, 2),)
    """

    name: ClassVar[str] = "mesh"
    needs_servers: ClassVar[bool] = False
    whole_layers: ClassVar[bool] = False

    def facts(self) -> Facts:
        return facts("every worker holds", "layers stay whole")

    def deal(self, nbytes: Sequence[int], cluster: Cluster) -> tuple[tuple[Node, ...], ...]:
        return (cluster.worker_nodes,) * len(nbytes)
