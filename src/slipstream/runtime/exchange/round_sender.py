"""What one worker sends in rounds: its contributions, and the results that it forwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from slipstream.plan import Plan
from slipstream.runtime.exchange.forwarding import Forwarding
from slipstream.runtime.exchange.unit_state import UnitState
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.transports.protocol import Ticket
from slipstream.transports.wire import Early, Publish, Push
from slipstream.types import Buffer, Node, Rank


class RoundSender:
    """Sends to the right members with the right priority, and counts the bytes.

    Attributes:
        sent: Payload bytes by scheme, without traffic within this host.
        received: The same for received payload, as passed to ``count``.
        forwarding: To whom this worker forwards results.
    """

    def __init__(
        self, rank: Rank, plan: Plan, member: Endpoint, colocated: Collection[str]
    ) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.forwarding = Forwarding(plan)
        self._rank, self._plan, self._member = rank, plan, member
        self._colocated = {plan.cluster.name(rank), *colocated}

    def contribute(
        self, state: UnitState, body: Push | Early, frames: Sequence[Buffer]
    ) -> list[Ticket]:
        """Send to all holders of the unit; a mesh includes this worker itself."""
        holders = self._plan.holders[state.unit.index]
        if state.unit.layer is not None and state.on_mesh:
            # Each worker starts with the next rank, so that no link receives the rows of all at
            # once.
            holders = holders[self._rank + 1 :] + holders[: self._rank + 1]
        return self._send(holders, state, body, frames)

    def forward(self, state: UnitState, body: Publish, frames: Sequence[Buffer]) -> None:
        """Forward a result unchanged to its receivers."""
        for holder in self._plan.holders[body.unit]:
            receivers = self.forwarding.receivers(self._rank, holder, state.unit)
            self._send(receivers, state, body, frames)

    def count(
        self, counter: Counter[str], peer: str, scheme: str, frames: Sequence[Buffer]
    ) -> None:
        """Add payload to ``sent`` or ``received``, unless the peer is on this host."""
        if peer not in self._colocated:
            counter[scheme] += sum(memoryview(frame).nbytes for frame in frames)

    def _send(
        self,
        nodes: Sequence[Node],
        state: UnitState,
        body: Push | Early | Publish,
        frames: Sequence[Buffer],
    ) -> list[Ticket]:
        priority = self._plan.priority(state.unit)
        tickets = []
        for node in nodes:
            peer = self._plan.cluster.name(node)
            self.count(self.sent, peer, state.route.scheme, frames)
            ticket = self._member.send(peer, body, frames, priority=priority)
            if ticket is not None:
                tickets.append(ticket)
        return tickets
