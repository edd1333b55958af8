"""A restarted worker rejoins a job with partial exchange.

It is a new process that replaces the dead one. It sends a request to rank 0, which admits it at the
end of one of its own steps. All peers get its address. It continues training as soon as it has
rank 0's weights and all peers accept its updates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from slipstream.errors import FrameRefused, LeftBehind
from slipstream.runtime.gossip.gossip import GossipChannel
from slipstream.runtime.gossip.membership_events import Applicant
from slipstream.runtime.members.member import HUB, Member
from slipstream.runtime.process.event_log import log_event
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import Greeting, Message, Return, Returned, Welcome
from slipstream.types import rank_of

logger = logging.getLogger(__name__)
Standing = Callable[[], list[int]]


class JoinCoordinator:
    """Admits restarted workers, on rank 0.

    Args:
        exchange: Rank 0's own channel.
        member: Rank 0.
        workers: How many the job was started with.
        standing: Returns other numbers that a restarted worker needs.
        give: Sends other state to a restarted worker, by its name.
    """

    def __init__(
        self,
        exchange: GossipChannel,
        member: Member,
        workers: int,
        standing: Standing = lambda: [0],
        give: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._workers, self._standing, self._give = workers, standing, give
        self._moved: dict[int, tuple[str, int]] = {}  # address and process of restarted workers
        self._exchange, self._member = exchange, member
        member.on(Return, self._on_return)
        exchange.admit_with(self._admit)

    def _on_return(self, message: Message[Return]) -> None:
        body, rank = message.body, rank_of(message.sender)
        if not 1 <= rank < self._workers:
            raise FrameRefused(f"{message.sender} cannot come back")
        if body.incarnation <= self._exchange.links.incarnation_of(rank):
            raise FrameRefused(
                f"{message.sender} comes back in incarnation {body.incarnation}, but has been in "
                f"{self._exchange.links.incarnation_of(rank)}: SLIPSTREAM_INCARNATION must grow"
            )
        if message.sender in self._member.roster.heard:  # its death is not yet detected
            self._member.coordination.give_up(message.sender)
            self._member.pump.handle_later(message)
            return
        self._member.transport.connect(message.sender, body.address)
        self._exchange.apply(Applicant(rank, body.address, body.incarnation, message.process))

    def _admit(self, applicant: Applicant) -> None:
        rank, drains = applicant.rank, self._exchange.drains
        self._member.coordination.readmit(f"rank {rank}", applicant.address, applicant.process)
        lost = self._member.lost
        others = [p for p in self._exchange.peers if p != rank and f"rank {p}" not in lost]
        told = Returned(rank, applicant.address, applicant.process, applicant.incarnation, drains)
        for peer in others:
            self._member.send(f"rank {peer}", told, priority=CONTROL)
        made, bytes_s = self._exchange.made, self._exchange.pace.bytes_s
        moved = [(peer, *self._moved[peer]) for peer in others if peer in self._moved]
        welcome = Welcome(made, drains, [0, *others], moved, self._standing(), bytes_s)
        self._moved[rank] = (applicant.address, applicant.process)
        # In order with the messages about lost and returned workers.
        self._member.send(f"rank {rank}", welcome, priority=CONTROL)
        self._give(f"rank {rank}")
        step = self._standing()[0] + made
        log_event(logger, "member_admitted", member=f"rank {rank}", step=step)


class JoinPeer:
    """On every other worker."""

    def __init__(self, exchange: GossipChannel, member: Member) -> None:
        self._exchange, self._member = exchange, member
        member.on(Returned, self._on_returned)

    def _on_returned(self, message: Message[Returned]) -> None:
        body = message.body
        if message.sender != HUB:
            raise FrameRefused(f"{message.sender} does not say who is back")
        self._member.coordination.readmit(f"rank {body.rank}", body.address, body.process)
        self._exchange.expect_back(body.rank, body.incarnation, body.drains)
        self._member.send(f"rank {body.rank}", Greeting())


class Joiner:
    """On the restarted worker."""

    def __init__(self, exchange: GossipChannel, member: Member, limit_s: float) -> None:
        self._exchange, self._member, self._limit_s = exchange, member, limit_s
        self._welcome: Welcome | None = None
        self._greeted: set[int] = {0}
        member.on(Welcome, self._on_welcome)
        member.on(Greeting, self._on_greeting)

    def come_back(self) -> Welcome:
        """Wait until this worker has rank 0's weights and all peers accept its updates."""
        self.ask()
        self._wait(lambda: self._welcome is not None, lambda: [HUB])
        if self._welcome is None:
            raise LeftBehind(self._member.name, "came back when training had finished")
        self._member.expect(HUB)
        self._wait(self.ready, self._missing)
        return self.enter()

    def ask(self) -> None:
        self._member.send(
            HUB, Return(self._member.transport.address, self._exchange.links.incarnation)
        )

    def ready(self) -> bool:
        return self._welcome is not None and not self._missing()

    def enter(self) -> Welcome:
        assert self._welcome is not None
        self._exchange.catch_up(self._welcome)
        return self._welcome

    def _wait(self, holds: Callable[[], bool], missing: Callable[[], list[str]]) -> None:
        self._member.wait_until(
            lambda: holds() or self._member.dismissed,
            what="rank 0 and all peers to admit this worker",
            limit_s=self._limit_s,
            missing=missing,
        )

    def _missing(self) -> list[str]:
        """Rank 0 is missing until all of its weights have arrived; peers that died are not
        missing."""
        assert self._welcome is not None
        here = self._greeted if self._exchange.heard_of(0) else self._greeted - {0}
        awaited = [peer for peer in self._welcome.peers if peer not in here]
        return [f"rank {peer}" for peer in awaited if not self._exchange.has_event_of(peer)]

    def _on_welcome(self, message: Message[Welcome]) -> None:
        if message.sender != HUB:
            raise FrameRefused(f"a welcome from {message.sender}")
        for rank, address, process in message.body.moved:
            self._member.coordination.readmit(f"rank {rank}", address, process)
        self._exchange.on_admitted(message.body)
        with self._member.updating():
            self._welcome = message.body

    def _on_greeting(self, message: Message[Greeting]) -> None:
        with self._member.updating():
            self._greeted.add(rank_of(message.sender))
