"""All-to-all: every worker sends its whole gradient to every peer; no servers.

- Topology: mesh over point-to-point links; each worker sums for itself, in rank order.
- Consistency: rounds of all n workers.
- What travels: dense gradients, (n−1) models out and (n−1) in. The costly baseline of the papers.
- When: as each layer's backward ends.
"""

from __future__ import annotations

from slipstream.codecs import Dense
from slipstream.codecs.dense import Wire
from slipstream.consistency import Rounds
from slipstream.schedules import WaitFree
from slipstream.strategy import Route, Strategy
from slipstream.topologies import Mesh
from slipstream.types import Cluster, Spec


def all_to_all(*, wire: Wire = "own") -> Strategy:
    """Dense gradients over the peer mesh."""
    road = Route(Mesh(), push=Dense(wire), publish=Dense())

    def route(spec: Spec, cluster: Cluster) -> Route:
        return road

    return Strategy("all_to_all", route=route, consistency=Rounds(), schedule=WaitFree())
