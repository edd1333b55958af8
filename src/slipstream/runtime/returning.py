"""A worker that has died comes back into a job whose workers exchange slices.

It is a new process in the place of the old one. It asks rank 0, which lets it in at the end of one
of its own steps; everybody learns where it listens, and it trains on as soon as it has rank 0's
weights and all others take its updates.
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream.errors import FrameRefused, LeftBehind
from slipstream.runtime.crew import say
from slipstream.runtime.exchange import rank_of
from slipstream.runtime.member import HUB, Member
from slipstream.runtime.partial_exchange import Applicant, PartialExchange
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import Greeting, Message, Return, Returned, Welcome

Standing = Callable[[], list[int]]


class Doorkeeper:
    """At rank 0: who may come in again. ``standing``: what else such a one must know."""

    def __init__(self, exchange: PartialExchange, member: Member, workers: int) -> None:
        self._workers = workers
        self._moved: dict[int, tuple[str, int]] = {}  # address and process of those who came back
        self.standing: Standing = lambda: [0]
        self.give: Callable[[str], None] = lambda name: None  # what else it needs
        self._exchange, self._member = exchange, member
        member.on(Return, self._on_return)
        exchange.admit = self._admit

    def _on_return(self, message: Message) -> None:
        body, rank = message.body, rank_of(message.sender)
        assert isinstance(body, Return)
        if not 1 <= rank < self._workers:
            raise FrameRefused(f"{message.sender} cannot come back")
        if body.life <= self._exchange.links.life_of(rank):
            raise FrameRefused(
                f"{message.sender} comes back in life {body.life}, but has been in "
                f"{self._exchange.links.life_of(rank)}: SLIPSTREAM_LIFE must grow"
            )
        if message.sender in self._member.roster.heard:  # it died a moment ago
            self._member.give_up(message.sender)
            self._member.handle_again(message)
            return
        self._member.transport.connect(message.sender, body.address)
        self._exchange.apply(Applicant(rank, body.address, body.life, message.process))

    def _admit(self, applicant: Applicant) -> None:
        rank, drains = applicant.rank, self._exchange.drains
        self._member.readmit(f"rank {rank}", applicant.address, applicant.process)
        lost = self._member.lost
        others = [p for p in self._exchange.peers if p != rank and f"rank {p}" not in lost]
        told = Returned(rank, applicant.address, applicant.process, applicant.life, drains)
        for peer in others:
            self._member.send(f"rank {peer}", told, priority=CONTROL)
        made, bytes_s = self._exchange.made, self._exchange.pace.bytes_s
        moved = [(peer, *self._moved[peer]) for peer in others if peer in self._moved]
        welcome = Welcome(made, drains, [0, *others], moved, self.standing(), bytes_s)
        self._moved[rank] = (applicant.address, applicant.process)
        # In line with who is lost, and who is back.
        self._member.send(f"rank {rank}", welcome, priority=CONTROL)
        self.give(f"rank {rank}")
        say(f"rank {rank} is back, at step {self.standing()[0] + made}")


class Neighbour:
    """At every other worker."""

    def __init__(self, exchange: PartialExchange, member: Member) -> None:
        self._exchange, self._member = exchange, member
        member.on(Returned, self._on_returned)

    def _on_returned(self, message: Message) -> None:
        body = message.body
        assert isinstance(body, Returned)
        if message.sender != HUB:
            raise FrameRefused(f"{message.sender} does not say who is back")
        self._member.readmit(f"rank {body.rank}", body.address, body.process)
        self._exchange.expect_back(body.rank, body.life, body.drains)
        self._member.send(f"rank {body.rank}", Greeting())


class Returner:
    """At the worker that comes back."""

    def __init__(self, exchange: PartialExchange, member: Member, limit_s: float) -> None:
        self._exchange, self._member, self._limit_s = exchange, member, limit_s
        self._welcome: Welcome | None = None
        self._greeted: set[int] = {0}
        member.on(Welcome, self._on_welcome)
        member.on(Greeting, self._on_greeting)

    def come_back(self) -> Welcome:
        """Until this worker has the others' weights and they take its updates."""
        self.ask()
        self._wait(lambda: self._welcome is not None, lambda: [HUB])
        if self._welcome is None:
            raise LeftBehind(self._member.name, "came back when the others had finished training")
        self._member.expect(HUB)
        self._wait(self.ready, self._missing)
        return self.enter()

    def ask(self) -> None:
        self._member.send(HUB, Return(self._member.transport.address, self._exchange.links.life))

    def ready(self) -> bool:
        return self._welcome is not None and not self._missing()

    def enter(self) -> Welcome:
        assert self._welcome is not None
        self._exchange.catch_up(self._welcome)
        return self._welcome

    def _wait(self, holds: Callable[[], bool], missing: Callable[[], list[str]]) -> None:
        self._member.wait_until(
            lambda: holds() or self._member.dismissed,
            what="the others to take this worker back",
            limit_s=self._limit_s,
            missing=missing,
        )

    def _missing(self) -> list[str]:
        """Rank 0 counts when all of its weights have come, and who has died since not at all."""
        assert self._welcome is not None
        here = self._greeted if self._exchange.heard_of(0) else self._greeted - {0}
        awaited = [peer for peer in self._welcome.peers if peer not in here]
        return [f"rank {peer}" for peer in awaited if not self._exchange.has_news_of(peer)]

    def _on_welcome(self, message: Message) -> None:
        assert isinstance(message.body, Welcome)
        if message.sender != HUB:
            raise FrameRefused(f"a welcome from {message.sender}")
        for rank, address, process in message.body.moved:
            self._member.readmit(f"rank {rank}", address, process)
        self._exchange.be_welcome(message.body)
        with self._member.changed:
            self._welcome = message.body
            self._member.changed.notify_all()

    def _on_greeting(self, message: Message) -> None:
        with self._member.changed:
            self._greeted.add(rank_of(message.sender))
            self._member.changed.notify_all()
