"""Sharded servers: each chunk has one holder, which answers every worker."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import ClassVar

from slipstream.errors import ConfigError, TooManyServers
from slipstream.parts import Facts, facts
from slipstream.topologies.protocol import Topology
from slipstream.types import Cluster, Node


class Sharded(Topology, frozen=True):
    """A topology with evenly dealt chunks: loads of shards differ by at most one chunk.

    Args:
        whole_layers: Keep the chunks of a layer together; shards may end up uneven.

    >>> Sharded().deal([100, 40, 60], Cluster(workers=2, servers=2))  # nodes 2 and 3 are servers
    ((2,), (3,), (3,))
    """

    whole_layers: bool = False

    name: ClassVar[str] = "sharded"

    def facts(self) -> Facts:
        whole = facts("layers stay whole") if self.whole_layers else facts()
        return facts("servers hold") | whole

    def deal(self, nbytes: Sequence[int], cluster: Cluster) -> tuple[tuple[Node, ...], ...]:
        if cluster.servers < 1:
            raise ConfigError("sharded routes need at least one server; this cluster has none")
        if len(nbytes) < cluster.servers:
            raise TooManyServers(
                f"{cluster.servers} servers but only {len(nbytes)} chunk(s) to hold: "
                f"ask for at most {len(nbytes)} server(s)"
            )
        return deal_evenly(nbytes, cluster.server_nodes)

    def fanout(self, node: Node, holder: Node, cluster: Cluster) -> tuple[Node, ...]:
        return cluster.worker_nodes if node == holder else ()


def deal_evenly(nbytes: Sequence[int], nodes: Sequence[Node]) -> tuple[tuple[Node, ...], ...]:
    """Return one holder for every chunk; loads of nodes differ by at most one chunk."""
    # Largest first to the lightest shard: the heaviest shard was the lightest before its last
    # chunk, so the difference is at most that chunk.
    shards = [(0, node) for node in nodes]
    holders: list[tuple[Node, ...]] = [()] * len(nbytes)
    for index in sorted(range(len(nbytes)), key=lambda i: -nbytes[i]):
        load, node = heapq.heappop(shards)
        holders[index] = (node,)
        heapq.heappush(shards, (load + nbytes[index], node))
    return tuple(holders)
