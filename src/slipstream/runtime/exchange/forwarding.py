"""Where each node sends or forwards results, also after workers are lost."""

from __future__ import annotations

from slipstream.plan import Plan
from slipstream.topologies import Topology
from slipstream.types import Node, Rank, Unit


class Forwarding:
    """The topologies of a plan's routes, without the workers that are lost."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._topologies: list[Topology] = [route.topology for route in plan.routes]

    def lose(self, rank: Rank) -> None:
        """A worker is lost: its children get results another way."""
        self._topologies = [topology.without(rank) for topology in self._topologies]

    def receivers(self, node: Node, holder: Node, unit: Unit) -> tuple[Node, ...]:
        """To whom ``node`` sends a unit's results of ``holder``."""
        return self._topologies[unit.route].fanout(node, holder, self._plan.cluster)

    def may_send(self, sender: str, unit: Unit) -> bool:
        """Whether a unit's results may come from this member: from a holder that publishes them,
        or, where workers forward, from any worker. Which worker forwards changes with losses."""
        route, cluster = self._plan.route(unit), self._plan.cluster
        for holder in self._plan.holders[unit.index]:
            if cluster.name(holder) == sender and route.topology.fanout(holder, holder, cluster):
                return True
        return route.topology.relays and cluster.worker(sender) >= 0
