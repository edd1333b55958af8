"""Server 0's decisions: which contributions make a round, and which batches workers train on.

Every server gets every decision, in the same order and with the same priority, so all servers
combine the same contributions.
"""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.consistency import Decider
from slipstream.consistency.decisions import Decision, Late, RoundRecord
from slipstream.consistency.leases import Leases
from slipstream.errors import FrameRefused
from slipstream.plan import Plan
from slipstream.planning.backups import Adapting
from slipstream.runtime.exchange.transfer import Transfer
from slipstream.runtime.files.state_entries import SNAPSHOT
from slipstream.runtime.servers.senders import asking_rank, server_of, worker_of
from slipstream.transports.wire import (
    Arrived,
    Commit,
    Fetch,
    Lease,
    Leased,
    Message,
    Serve,
    SnapshotDue,
)
from slipstream.types import Rank

IDLE_S = 0.25
TICKS_PER_LIMIT = 20  # a round that closes by time closes at most 1/20 of its limit late
ADAPTING = Adapting()


class RoundCoordinator:
    """The part of server 0 that decides for all servers.

    Attributes:
        decider: Decides which contributions make each round; None if the plan needs no decisions.
    """

    def __init__(self, plan: Plan, transfer: Transfer) -> None:
        self._plan = plan
        self._member = member = transfer.member
        cluster = plan.cluster
        holding = sum(bool(plan.held_by(node)) for node in cluster.server_nodes)
        self.decider = plan.consistency.admit.decider(
            cluster.workers, holding, reconsider=ADAPTING.first_after
        )
        self._leases: Leases | None = None
        member.on(Arrived, self._on_arrived)
        member.on(Lease, self._on_lease)
        transfer.serve(SNAPSHOT, self._on_snapshot)

    def tick(self) -> None:
        """Close rounds whose time limit has passed."""
        if self.decider is not None:
            self._announce(self.decider.tick(self._member.now))

    @property
    def tick_every_s(self) -> float:
        if self.decider is None or self.decider.close_after_s is None:
            return IDLE_S
        return min(IDLE_S, self.decider.close_after_s / TICKS_PER_LIMIT)

    @property
    def record(self) -> RoundRecord | None:
        """The figures of the rounds that were decided here."""
        return None if self.decider is None else self.decider.record

    def on_worker_left(self, rank: Rank, *, lost: bool) -> None:
        """Decide without a worker from now on; its unfinished batches go to other workers."""
        if self.decider is None:
            return
        if self._leases is not None:
            self._leases.forfeit(rank, keeping=self.decider.is_in(rank))
        self._announce(self.decider.retire(rank, self._member.now, lost=lost))

    def _on_arrived(self, message: Message[Arrived]) -> None:
        decider, server = self._require_decider(), server_of(message.sender)
        if not 0 <= server < decider.holders:
            raise FrameRefused(f"{message.sender} is no server")
        body = message.body
        self._announce(decider.arrived(server, body.rank, body.round, self._member.now))

    def _on_snapshot(self, message: Message[Fetch]) -> None:
        self._require_decider()
        self._send_to_servers(SnapshotDue(asking_rank(message, self._plan.cluster)))

    def _on_lease(self, message: Message[Lease]) -> None:
        rank = worker_of(message, self._plan.cluster)
        if self._leases is None:
            self._leases = Leases(message.body.batches)
        if self._leases.batches != message.body.batches:
            raise FrameRefused(f"{message.body.batches} batches; others have another number")
        self._leases.give_back(rank, message.body.returned)
        batch = self._leases.lease(rank)
        self._member.send(message.sender, Leased(batch.epoch, batch.number))
        if self.decider is None:
            self._leases.finish(rank, counts=True)  # without decisions, every gradient counts

    def _require_decider(self) -> Decider:
        if self.decider is None:
            raise FrameRefused(f"{self._member.name} does not decide on rounds")
        return self.decider

    def _announce(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Late):
                self._send_to_servers(Serve(decision.round, decision.rank))
            else:
                self._send_to_servers(Commit(decision.round, list(decision.ranks)))
            self._finish_leases(decision)

    def _send_to_servers(self, body: Commit | Serve | SnapshotDue) -> None:
        cluster = self._plan.cluster
        for node in cluster.server_nodes:
            self._member.send(cluster.name(node), body)

    def _finish_leases(self, decision: Decision) -> None:
        """End the leases of a decision's workers. A batch counts if its gradient made the round, or
        will make a later one from its sender's residual; otherwise it is leased again."""
        if self._leases is None:
            return
        if isinstance(decision, Late):
            if self._plan.keeps_dropped:
                self._leases.defer(decision.rank)
            else:
                self._leases.finish(decision.rank, counts=False)
        else:
            for rank in decision.ranks:
                self._leases.finish(rank, counts=True)
