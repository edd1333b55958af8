"""Workers hold shares: a reduce-scatter and an all-gather over links, without servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from slipstream.parts import Facts, facts
from slipstream.topologies.protocol import Topology
from slipstream.topologies.sharded import deal_evenly
from slipstream.types import Cluster, Node


class PeerSharded(Topology, frozen=True):
    """A topology in which every worker holds an even share and sends its results to all.

    A worker sends (n − 1)/n of the model on the way up and as much on the way down, like a ring
    all-reduce; but each value is encoded once on each way, so that any codec of values may be used.

    >>> PeerSharded().deal([100, 40, 60], Cluster(workers=2))
    ((0,), (1,), (1,))
    >>> PeerSharded().fanout(node=1, holder=1, cluster=Cluster(workers=4))
    (2, 3, 0)
    """

    name: ClassVar[str] = "peers"
    needs_servers: ClassVar[bool] = False
    whole_layers: ClassVar[bool] = False

    def facts(self) -> Facts:
        return facts("workers hold shares")

    def shares(self, cluster: Cluster) -> int:
        return cluster.workers

    def deal(self, nbytes: Sequence[int], cluster: Cluster) -> tuple[tuple[Node, ...], ...]:
        return deal_evenly(nbytes, cluster.worker_nodes)

    def fanout(self, node: Node, holder: Node, cluster: Cluster) -> tuple[Node, ...]:
        """Return receivers, next worker first, so that no link gets all results at once."""
        if node != holder:
            return ()
        workers = cluster.worker_nodes
        return workers[node + 1 :] + workers[:node]
