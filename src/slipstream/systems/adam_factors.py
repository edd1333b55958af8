"""Project Adam's way (Chilimbi and others, 2014), as the Poseidon paper compares it.

- What travels: a fully connected layer's factors up to the one server that holds the layer, its
  whole gradient matrix back to every worker; everything else dense, both ways.
- Topology: sharded servers. A layer is not split among them, so whoever holds a large one sends
  its matrix to all workers: the imbalance that Poseidon's figure 10 shows.
- Consistency: rounds of all n workers.
- When: as each layer's backward ends.
"""

from __future__ import annotations

from slipstream.codecs import Dense
from slipstream.consistency import Rounds
from slipstream.planning.hybrid import Hybrid
from slipstream.schedules import WaitFree
from slipstream.strategy import Route, Strategy
from slipstream.topologies import Sharded
from slipstream.types import Cluster, Spec


def adam_factors() -> Strategy:
    """Factors to the layer's server, the matrix back."""
    road = Route(Sharded(whole_layers=True), push=Dense(), publish=Dense())

    def route(spec: Spec, cluster: Cluster) -> Route:
        return road

    return Strategy(
        "adam_factors",
        route=route,
        consistency=Rounds(),
        schedule=WaitFree(),
        hybrid=Hybrid(choose="always", wire="float32", to="server"),
    )
