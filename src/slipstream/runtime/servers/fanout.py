"""The receivers of a server's results, also while workers are lost and routes change."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.plan import Plan
from slipstream.runtime.exchange.aggregator import Aggregator, Result
from slipstream.runtime.exchange.forwarding import Forwarding
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.servers.senders import require_rank, worker_of
from slipstream.transports.wire import Message, RouteUpdated
from slipstream.types import Node, Rank


class Fanout:
    """A sender of one server's results along each route's topology.

    A worker that has left gets results only if it forwards them to others. When a worker is lost,
    results go directly to every remaining worker until all of them have confirmed
    (``RouteUpdated``) that they forward results without the lost one.
    """

    def __init__(self, node: Node, plan: Plan, member: Endpoint) -> None:
        self._node, self._plan, self._member = node, plan, member
        self._forwarding = Forwarding(plan)
        self._gone: set[Rank] = set()  # workers that left or were lost
        self._lost: set[Rank] = set()
        self._confirmed: dict[Rank, set[Rank]] = {}  # by lost worker: those that bypass it
        member.on(RouteUpdated, self._on_route_updated)

    def publish(self, results: Iterable[Result]) -> None:
        """Send results to the workers that get them from this server directly."""
        for result in results:
            self._send(result, self._targets(result))

    def on_worker_left(self, rank: Rank, aggregator: Aggregator, *, lost: bool) -> None:
        """Stop sending to a worker. If it was lost, resend recent results to the others.

        The lost worker may have received them without forwarding them. If rounds need no particular
        worker, no worker forwards, results name their receivers, and a lost worker may come back.
        """
        # A worker that has left may still forward results, and be lost later.
        known = self._lost if lost else self._gone
        if self._plan.counts_rounds or rank in known:
            return
        self._gone.add(rank)
        if lost:
            self._lost.add(rank)
            self._forwarding.lose(rank)
            for result in aggregator.replay():
                self._send(result, self._remaining())

    def _on_route_updated(self, message: Message[RouteUpdated]) -> None:
        rank, lost = worker_of(message, self._plan.cluster), message.body.rank
        require_rank(lost, self._plan.cluster)
        # This may arrive before rank 0's message that the worker is lost.
        self._confirmed.setdefault(lost, set()).add(rank)

    def _send(self, result: Result, targets: Iterable[Node]) -> None:
        priority = self._plan.priority(self._plan.units[result.body.unit])
        for target in targets:
            name = self._plan.cluster.name(target)
            self._member.send(name, result.body, result.frames, priority=priority)

    def _remaining(self) -> set[Rank]:
        return set(self._plan.cluster.worker_nodes) - self._gone

    def _targets(self, result: Result) -> Iterable[Node]:
        """Yield the workers that get a result directly; the others get it from them."""
        remaining = self._remaining()
        if result.audience is not None and not remaining <= set(result.audience):
            return result.audience
        if any(remaining - self._confirmed.get(lost, set()) for lost in self._lost):
            return remaining
        node, unit = self._node, self._plan.units[result.body.unit]
        receivers = self._forwarding.receivers
        targets = receivers(node, node, unit)
        return [to for to in targets if to in remaining or receivers(to, node, unit)]
