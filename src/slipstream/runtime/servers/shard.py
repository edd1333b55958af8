"""One configured server: takes contributions to its units and publishes results."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from slipstream.errors import FrameRefused, RuntimeFault
from slipstream.runtime.exchange.aggregator import Aggregator, Result
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.members.member import HUB
from slipstream.runtime.servers.accounts import figures_of
from slipstream.runtime.servers.fanout import Fanout
from slipstream.runtime.servers.round_coordinator import RoundCoordinator
from slipstream.runtime.servers.senders import (
    COORDINATOR,
    asking_rank,
    require_coordinator,
    require_rank,
)
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import (
    Account,
    Arrived,
    Commit,
    Early,
    Inquire,
    Leave,
    Message,
    Push,
    Serve,
    WorkerLeft,
)
from slipstream.types import Node


class Shard:
    """The units of one server.

    Args:
        node: This server's node in the plan.
        aggregator: Combines contributions, round by round.
        member: This server's endpoint for the pair.
        coordinator: Server 0's; None at all other servers.
    """

    def __init__(
        self,
        node: Node,
        aggregator: Aggregator,
        member: Endpoint,
        coordinator: RoundCoordinator | None,
    ) -> None:
        plan = aggregator.plan
        self.aggregator, self.coordinator = aggregator, coordinator
        self._plan, self._member = plan, member
        self._fanout = Fanout(node, plan, member)
        member.on(Push, self._on_push)
        member.on(Early, self._on_early)
        member.on(Commit, self._on_commit)
        member.on(Serve, self._on_serve)
        member.on(WorkerLeft, self._on_worker_left)
        member.on(Inquire, self._on_inquire)

    def _on_push(self, message: Message[Push]) -> None:
        rank = self._plan.cluster.worker(message.sender)
        self._apply(lambda: self.aggregator.push(rank, message.body, message.frames))
        for round_, complete in self.aggregator.collector.whole():
            self._member.send(COORDINATOR, Arrived(complete, round_))

    def _on_early(self, message: Message[Early]) -> None:
        rank = self._plan.cluster.worker(message.sender)
        self.aggregator.early(rank, message.body, message.frames)

    def _on_commit(self, message: Message[Commit]) -> None:
        require_coordinator(message)
        self._fanout.publish(self.aggregator.commit(message.body.round, message.body.ranks))

    def _on_serve(self, message: Message[Serve]) -> None:
        require_coordinator(message)
        require_rank(message.body.rank, self._plan.cluster)
        self._fanout.publish(self.aggregator.serve(message.body.round, message.body.rank))

    def _on_worker_left(self, message: Message[WorkerLeft]) -> None:
        """Handle a worker's report that it has left, or rank 0's that a worker is lost."""
        rank = message.body.rank
        lost = self._plan.cluster.worker(message.sender) != rank
        require_rank(rank, self._plan.cluster)
        if lost and message.sender != HUB:
            raise FrameRefused(f"{message.sender} does not speak for rank {rank}")
        self._fanout.on_worker_left(rank, self.aggregator, lost=lost)
        self._apply(lambda: self.aggregator.retire(rank))
        if self.coordinator is not None:
            # A host that has lost a worker does not come back, whatever its other workers still
            # send.
            may_return = lost and not self._plan.cluster.members
            self.coordinator.on_worker_left(rank, lost=may_return)

    def _on_inquire(self, message: Message[Inquire]) -> None:
        asking_rank(message, self._plan.cluster)
        record = None if self.coordinator is None else self.coordinator.record
        figures = msgspec.structs.replace(
            figures_of(self.aggregator, record),
            refused=self._member.refused,
            last_refusal=self._member.last_refusal,
        )
        self._member.send(message.sender, Account(), [msgspec.json.encode(figures)])

    def _apply(self, change: Callable[[], list[Result]]) -> None:
        """Make a change to a round and publish the results of the rounds that it closes.

        If the change shows that training has gone wrong, the job ends: rank 0 gets the reason.
        """
        try:
            results = change()
        except FrameRefused:
            raise
        except RuntimeFault as fault:
            self._member.send(HUB, Leave(str(fault)), priority=CONTROL)
            raise
        self._fanout.publish(results)
