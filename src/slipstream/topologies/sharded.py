"""Sharded servers: each chunk has one holder, which answers every worker."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from slipstream.errors import ConfigError, TooManyServers
from slipstream.types import Cluster, Node, Rank


@dataclass(frozen=True, slots=True)
class Sharded:
    """Chunks dealt evenly: no shard is more than one chunk heavier than another.

    With ``whole_layers`` the chunks of a layer stay together, and shards may end up uneven.
    """

    whole_layers: bool = False

    name: ClassVar[str] = "sharded"
    needs_servers: ClassVar[bool] = True
    relays: ClassVar[bool] = False

    def deal(self, nbytes: Sequence[int], cluster: Cluster) -> tuple[tuple[Node, ...], ...]:
        if cluster.servers < 1:
            raise ConfigError("sharded routes need at least one server; this cluster has none")
        if len(nbytes) < cluster.servers:
            raise TooManyServers(
                f"{cluster.servers} servers but only {len(nbytes)} chunk(s) to hold: "
                f"ask for at most {len(nbytes)} server(s)"
            )
        # Largest first to the lightest shard: whoever ends heaviest was the lightest before its
        # last chunk, so the difference is at most that chunk.
        shards = [(0, node) for node in cluster.server_nodes]
        holders: list[tuple[Node, ...]] = [()] * len(nbytes)
        for index in sorted(range(len(nbytes)), key=lambda i: -nbytes[i]):
            load, node = heapq.heappop(shards)
            holders[index] = (node,)
            heapq.heappush(shards, (load + nbytes[index], node))
        return tuple(holders)

    def fanout(self, node: Node, holder: Node, cluster: Cluster) -> tuple[Node, ...]:
        return cluster.worker_nodes if node == holder else ()

    def without(self, rank: Rank) -> Sharded:
        return self
