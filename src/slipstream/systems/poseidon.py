"""Poseidon (Zhang and others, 2017): each layer by its cheapest road, as its backward ends.

- What travels: a fully connected layer's sufficient factors (X and dY) from peer to peer where that
  is cheaper than its dense gradient, an embedding's touched rows likewise; everything else dense.
- Dense roads: collectives; or sharded servers where dedicated ones make that cheaper, and wherever
  the paper's own rule (``choose="bytes"``) is asked for.
- Chosen for every layer from its shape, the batch, the cluster, and measured speeds of links, GEMM
  and servers; chosen again when the batch changes.
- Consistency: rounds of all n workers.
- When: as each layer's backward ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from slipstream.codecs import Dense
from slipstream.consistency import Rounds
from slipstream.errors import UnknownStrategy
from slipstream.planning.costs import Speeds, dense_link_bytes
from slipstream.planning.hybrid import Hybrid
from slipstream.schedules import WaitFree
from slipstream.strategy import Route, Strategy
from slipstream.topologies import Mesh, Sharded
from slipstream.types import Cluster, Spec
from slipstream.units import bits_per_second

SHARDS = Route(Sharded(), push=Dense(), publish=Dense())
COLLECTIVE = Route(Mesh(), push=Dense(), publish=Dense(), road="collective")
BETWEEN_WORKERS = Route(Mesh(), push=Dense(), publish=Dense())


def poseidon(
    *,
    choose: Literal["time", "bytes"] = "time",
    wire: Literal["own", "bfloat16"] = "own",
    rate: str | float | None = None,
    gemm_gflops: float = 50.0,
    server_gbytes: float = 5.0,
    dense: Sequence[str] = (),
) -> Strategy:
    """Hybrid communication. With ``rate`` (of a link, such as "10gbit") nothing is measured at the
    start; GEMM and server speeds are then the given ones. ``wire`` is the factors' precision;
    layers named in ``dense`` always travel dense."""
    speeds = None
    if rate is not None:
        if gemm_gflops <= 0 or server_gbytes <= 0:
            raise UnknownStrategy("poseidon: gemm_gflops and server_gbytes must be above 0")
        speeds = Speeds(bits_per_second(rate), gemm_gflops * 1e9, server_gbytes * 1e9)

    def route(spec: Spec, cluster: Cluster) -> Route:
        if choose == "bytes":
            return SHARDS
        if spec.role == "buffer":
            return BETWEEN_WORKERS
        return cheaper_dense_road(cluster)

    return Strategy(
        "poseidon",
        route=route,
        consistency=Rounds(),
        schedule=WaitFree(),
        hybrid=Hybrid(choose, wire, speeds, tuple(dense)),
    )


def cheaper_dense_road(cluster: Cluster) -> Route:
    """Dedicated servers, if there are enough of them, need fewer bytes of each link than a ring."""
    ring = dense_link_bytes(1.0, cluster.workers, 0, dedicated=False)
    if not cluster.dedicated:
        return COLLECTIVE
    shards = dense_link_bytes(1.0, cluster.workers, cluster.servers, dedicated=True)
    return SHARDS if shards < ring else COLLECTIVE
