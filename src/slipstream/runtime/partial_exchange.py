"""Every worker's updates to every other one, a slice at a time, beside the training.

What a worker owes its peers accumulates; a slice leaves for a peer when the one before has left, so
a slow link makes slices fuller and never a queue. Slices are added to the weights as they arrive,
on the receiving thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from slipstream.codecs.partition import Debt, Floats, Owed, Rotation
from slipstream.consistency.reach import WithinReach
from slipstream.errors import FrameRefused, contribution_of
from slipstream.planning.slices import Slices
from slipstream.runtime.exchange import rank_of
from slipstream.runtime.member import Member
from slipstream.runtime.numbered_links import NumberedLinks
from slipstream.runtime.pace import Pace
from slipstream.transports.protocol import Ticket
from slipstream.transports.wire import Adopted, Message, Part, Tail, Welcome, checksum
from slipstream.types import Rank

MESSAGE_VALUES = 1 << 18
NEVER = 1 << 62  # drains of one that has finished: nobody waits for it
SCHEME = "slices"


@dataclass(frozen=True, slots=True)
class Gone:
    """A peer has died."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Back:
    """A peer has come back, and counts as having drained so often."""

    rank: Rank
    drains: int


@dataclass(frozen=True, slots=True)
class Applicant:
    """A worker that was started again, for the ``life``-th time, and where it listens now."""

    rank: Rank
    address: str
    life: int
    process: int = 0


class Weights(Protocol):
    """All trained weights as one vector."""

    @property
    def numel(self) -> int: ...

    def add(self, start: int, values: Floats) -> None:
        """To the weights from ``start`` on; from any thread."""
        ...

    def whole(self) -> Floats:
        """A copy of all of them."""
        ...

    def clear(self) -> None:
        """Zeros, to which everything is added."""
        ...

    def stepped(self, step: Callable[[], object], coefficient: float) -> Floats:
        """What ``step`` does to the weights, times the coefficient; so much of it is done."""
        ...


class PartialExchange:
    """One worker's end of all its links; implements ``Exchange``.

    The training thread owns what is owed. The receiving thread adds what comes to the weights and
    says, in order, who has died and who is back.
    """

    def __init__(
        self,
        rank: Rank,
        slices: Slices,
        rule: WithinReach,
        member: Member,
        weights: Weights,
        peers: Collection[Rank],
        pace: Pace,
        *,
        limit_s: float,
        life: int = 0,
    ) -> None:
        self.step = 0
        self.wait_s = 0.0
        self.received: Counter[str] = Counter()
        self.made = 0  # steps of this worker
        self.merged = 0  # how often a slice had to wait and grew fuller
        self.weights, self.pace = weights, pace
        self.links = NumberedLinks(member, life)
        self.entered = not life  # whether the others know of this worker
        self.admit: Callable[[Applicant], None] = lambda applicant: None
        self._rank, self._slices, self._rule, self._member = rank, slices, rule, member
        self._limit_s = limit_s
        self._begun_s = time.monotonic()
        # ---- the training thread's
        self._everybody = frozenset(peers)
        self._peers = set(peers)  # to whom updates are owed
        self._owed = self._rotated()
        self._left_over: list[Debt] = []  # of the rotation before
        self._leaving: defaultdict[Rank, list[Ticket]] = defaultdict(list)
        self._drains = 0  # begun
        self._told: dict[Rank, int] = dict.fromkeys(peers, 0)  # drains after which all has left
        self._final = False
        self._waited_s = 0.0
        self._applicants: list[Applicant] = []
        # ---- under the member's lock
        self._news: list[Gone | Back | Applicant] = []
        # Steps a peer's slices told of; of one that was there before, nothing yet.
        self._heard = {} if life else dict.fromkeys(peers, 0)
        self._tails = dict.fromkeys(peers, 0)  # drains of a peer that have come to their end
        # ---- under a lock of its own, at rank 0: by newcomer, whose updates it gets from here
        # until they send them themselves
        self._arriving = threading.Lock()
        self._forwarding: dict[Rank, set[Rank]] = {}
        member.on(Part, self._on_part)
        member.on(Tail, self._on_tail)
        member.on(Adopted, self._on_adopted)

    @property
    def sent(self) -> Counter[str]:
        return Counter({SCHEME: self.links.sent_bytes})

    @property
    def partitions(self) -> int:
        return self._owed.rotation.partitions

    @property
    def workers(self) -> int:
        """Those that live."""
        return len(self._peers) + 1

    @property
    def debts(self) -> list[Debt]:
        """What is owed to whom; each takes as much memory as the model."""
        return self._left_over + self._owed.debts

    def _rotated(self) -> Owed:
        rotation = Rotation(self.pace.partitions, self._slices.same_for_all)
        return Owed(rotation, self._rank, self._peers, self.weights.numel)

    # ---- the training thread

    def give(self, update: Floats) -> None:
        """This step's update, which is in this worker's own weights already."""
        self._owed.add(update)
        self.made += 1
        self._member.round = self.made
        held_up = not self.offer()
        self.merged += held_up
        before_s, self._waited_s = self._waited_s, self.wait_s
        partitions = self.pace.stepped(self.wait_s - before_s, held_up)
        if partitions != self.partitions and not self._left_over:
            self._turn_over()

    def _turn_over(self) -> None:
        """All that is owed is to leave; what comes from now on is owed anew."""
        self._left_over += self._owed.debts
        self._owed = self._rotated()

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        """Until the next step may begin; slices that had to wait leave meanwhile."""
        self._member.check()
        self._until(self.may_begin, "another worker's step", self._behind)

    def drain(self, *, final: bool = False) -> None:
        """Until every worker has every update of every worker; all of them call it."""
        self.begin_drain(final=final)
        self._until(self.drained, "everybody's last updates", self._undrained)

    def begin_drain(self, *, final: bool = False) -> None:
        """``final``: this worker makes no more steps."""
        self.offer()  # who is back, or gone, is known then
        self._drains += 1
        self._final = final
        self._turn_over()

    def drained(self) -> bool:
        """Whether all has left, and everybody else's has come."""
        self._tell_tails()
        return not self._left_over and not self._undrained()

    def _tell_tails(self) -> None:
        if self._left_over:
            return
        for peer in self._peers:
            if self._told[peer] < self._drains:
                self._told[peer] = self._drains
                self.links.send(peer, Tail, self._drains, self._final)

    def tend(self) -> None:
        """While this worker waits for others in another way: they may wait for what it owes."""
        self.offer()
        self._tell_tails()

    def ready(self, tensor: int) -> None:
        """Nothing leaves before the optimizer's step."""

    def excuse(self, tensors: Collection[int]) -> None:
        """Everything travels in slices."""

    def flush(self) -> None:
        """An update is given as a whole."""

    def refresh(self) -> None:
        """Slices are taken as they come."""

    def _until(
        self, holds: Callable[[], bool], what: str, missing: Callable[[], list[str]]
    ) -> None:
        self.wait_s += self._member.tend_until(
            holds, self.offer, what=what, limit_s=self._limit_s, missing=missing
        )

    def may_begin(self) -> bool:
        with self._member.changed:
            return self._rule.may_begin(self.made, self._clocks(), self.partitions)

    def _clocks(self) -> dict[Rank, int]:
        """By peer, the last step heard of."""
        beats = self._member.roster.rounds
        return {
            peer: self._rule.clock(steps, beats.get(f"rank {peer}", 0), self.partitions)
            for peer, steps in self._heard.items()
        }

    def _behind(self) -> list[str]:
        with self._member.changed:
            clocks = self._clocks()
            slowest = min(clocks.values(), default=0)
            return [f"rank {peer}" for peer, steps in clocks.items() if steps == slowest]

    def _undrained(self) -> list[str]:
        with self._member.changed:
            return [f"rank {peer}" for peer, at in self._tails.items() if at < self._drains]

    def offer(self) -> bool:
        """Send what is due wherever the slice before has left; whether all could be sent."""
        self._hear_the_news()
        for debt in [debt for debt in self._left_over if self._free(debt.peers)]:
            self._send_part(debt.peers, 0, debt.total)
            self._left_over.remove(debt)
        due = [debt for debt in self._owed.debts if debt.fresh]
        free = [debt for debt in due if self._free(debt.peers)]
        for debt in free:
            self._send_part(debt.peers, *self._owed.take(debt))
        return len(free) == len(due) and not self._left_over

    def _free(self, peers: Collection[Rank]) -> bool:
        for peer in peers:
            self._leaving[peer] = [t for t in self._leaving[peer] if not t.done]
        return not any(self._leaving[peer] for peer in peers)

    def _send_part(self, peers: Collection[Rank], start: int, values: Floats) -> None:
        # Also where there is nothing in it, when there are fewer weights than partitions: it tells
        # the step.
        for offset in range(0, max(1, len(values)), MESSAGE_VALUES):
            piece = values[offset : offset + MESSAGE_VALUES].view(np.uint8)
            crc = checksum([piece])
            last = offset + MESSAGE_VALUES >= len(values)
            for peer in peers:
                fields = (self.made, start + offset, last, crc)
                ticket = self.links.send(peer, Part, *fields, frames=[piece])
                if ticket is not None:
                    self._leaving[peer].append(ticket)

    def account(self) -> dict[str, Any]:
        """What was predicted of the links, and what they carried."""
        elapsed_s = time.monotonic() - self._begun_s
        return self.pace.account() | {
            "used_bytes_s": self.links.sent_bytes / elapsed_s,
            "slices_merged": self.merged,
        }

    # ---- who dies and who comes back (still the training thread)

    def _hear_the_news(self) -> None:
        """Who is back gets rank 0's weights from it, and from the others what they owe rank 0.

        What a worker has sent to rank 0 and is not in those weights yet, rank 0 passes on. So who
        is back has every update once: in the weights, passed on, owed to rank 0, or made since.
        """
        with self._member.changed:
            news, self._news = self._news, []
        for each in news:
            self._applicants = [a for a in self._applicants if a.rank != each.rank]
            if isinstance(each, Gone):
                self._forget(each.rank)
            elif isinstance(each, Applicant):
                self._applicants.append(each)
            else:
                self._forget(each.rank)  # an earlier life, if its end was not heard of
                self.links.open(each.rank)
                owed = [debt.total for debt in self.debts if 0 in debt.peers]
                zeros = np.zeros(self.weights.numel, np.float32)
                self._include(each.rank, np.sum([zeros, *owed], axis=0), each.drains)
                self.links.send(0, Adopted, each.rank, self.links.life_of(each.rank))

    def let_in(self) -> None:
        """At rank 0, at the end of a step: those who were started again begin with this one."""
        self._hear_the_news()
        for applicant in self._applicants:
            self._readmit(applicant)
        self._applicants = []

    def _forget(self, peer: Rank) -> None:
        self.links.close(peer)
        self._peers.discard(peer)
        self._leaving[peer].clear()
        self._owed.forget(peer)
        self.pace.lose(f"rank {peer}")
        for debt in self._left_over:
            debt.peers.discard(peer)
        self._left_over = [debt for debt in self._left_over if debt.peers]

    def _include(self, peer: Rank, owed: Floats, drains: int) -> None:
        self._peers.add(peer)
        self._left_over.append(Debt(0, {peer}, owed))
        self._owed.include(peer)
        self.pace.gain(f"rank {peer}")
        self._told[peer] = drains

    def _readmit(self, applicant: Applicant) -> None:
        """At rank 0: let it in, tell everybody, and send it the weights."""
        rank = applicant.rank
        self._forget(rank)
        self.links.open(rank)
        with self._arriving:
            gone = {rank_of(name) for name in self._member.lost}
            self._forwarding[rank] = self._peers - {rank} - gone
            snapshot = self.weights.whole()
        self._know(rank, applicant.life, self._drains)
        self.admit(applicant)
        self._include(rank, snapshot, self._drains)

    def catch_up(self, welcome: Welcome) -> None:
        """This worker is the one that is back, and has the weights of so many steps."""
        self.made = self.step = self._member.round = welcome.steps
        self._drains = welcome.drains
        self._told = dict.fromkeys(self._told, welcome.drains)
        self.pace.bytes_s = welcome.bytes_s
        self.entered = True
        for peer in self._peers - set(welcome.peers):
            self._forget(peer)

    def heard_of(self, peer: Rank) -> bool:
        """Whether a whole slice of a peer's has come."""
        return peer in self._heard

    def has_news_of(self, peer: Rank) -> bool:
        """Whether one has died or come back, which the training thread does not know yet."""
        with self._member.changed:
            return any(each.rank == peer for each in self._news)

    @property
    def peers(self) -> list[Rank]:
        return sorted(self._peers)

    @property
    def drains(self) -> int:
        return self._drains

    # ---- the receiving thread

    def lose(self, peer: Rank) -> None:
        """A peer has died: nobody waits for it, and nothing is kept for it."""
        self.links.close(peer)
        with self._arriving:
            self._forwarding.pop(peer, None)
            for missing in self._forwarding.values():
                missing.discard(peer)
        with self._member.changed:
            self._heard.pop(peer, None)
            self._tails.pop(peer, None)
            self._news.append(Gone(peer))
            self._member.changed.notify_all()

    def be_welcome(self, welcome: Welcome) -> None:
        """This worker is the one that is back: what it heard before does not count any more."""
        with self._member.changed:
            self._news = []
            absent = sorted(self._everybody - set(welcome.peers))
            self._member.lost[:] = [f"rank {peer}" for peer in absent]
            known = self._tails
            self._tails = {peer: max(known.get(peer, 0), welcome.drains) for peer in welcome.peers}
            self._heard = {p: steps for p, steps in self._heard.items() if p in welcome.peers}
        for peer in welcome.peers:
            self.links.open(peer)

    def _know(self, peer: Rank, life: int, drains: int) -> None:
        """A peer is back: its updates count from now on."""
        self.links.renew(peer, life)
        with self._member.changed:
            self._tails[peer] = max(drains, self._tails.get(peer, 0))

    def expect_back(self, peer: Rank, life: int, drains: int) -> None:
        """The same, and the training thread is to send it what it lacks."""
        self._know(peer, life, drains)
        with self._member.changed:
            self._news.append(Back(peer, drains))

    def apply(self, applicant: Applicant) -> None:
        """At rank 0: one wants to be let in; see ``let_in``."""
        with self._member.changed:
            self._news.append(applicant)

    def _sender(self, message: Message, body: Part | Tail | Adopted) -> Rank | None:
        if rank_of(message.sender) not in self._tails:
            raise FrameRefused(f"a slice from {message.sender}, which is no peer")
        return self.links.sender(message, body)

    def _on_part(self, message: Message) -> None:
        body = message.body
        assert isinstance(body, Part)
        peer = self._sender(message, body)
        if peer is None:
            return
        with contribution_of("an update of the weights"):
            values = self._checked(body, message)
        with self._arriving:
            self.weights.add(body.start, values)
            for newcomer, missing in self._forwarding.items():
                if peer in missing:
                    fields = (body.steps, body.start, False, body.crc)
                    self.links.send(newcomer, Part, *fields, frames=message.frames)
        self.received[SCHEME] += values.nbytes
        self.links.taken(peer)
        with self._member.changed:
            if body.last:
                self._heard[peer] = max(self._heard.get(peer, 0), body.steps)
                self._member.changed.notify_all()

    def _checked(self, body: Part, message: Message) -> Floats:
        if len(message.frames) != 1:
            raise FrameRefused(f"a slice of {len(message.frames)} frames")
        frame = memoryview(message.frames[0])
        room = self.weights.numel - body.start
        if frame.nbytes % 4 or frame.nbytes // 4 > min(room, MESSAGE_VALUES):
            raise FrameRefused(
                f"a slice of {frame.nbytes} bytes from weight {body.start} of {self.weights.numel}"
            )
        if checksum(message.frames) != body.crc:
            raise FrameRefused("a slice whose checksum is wrong")
        return np.frombuffer(frame, np.float32)

    def _on_tail(self, message: Message) -> None:
        body = message.body
        assert isinstance(body, Tail)
        peer = self._sender(message, body)
        if peer is None:
            return
        self.links.taken(peer)
        with self._member.changed:
            self._tails[peer] = NEVER if body.final else body.drain
            if body.final:
                self._heard.pop(peer, None)
            self._member.changed.notify_all()

    def _on_adopted(self, message: Message) -> None:
        body = message.body
        assert isinstance(body, Adopted)
        peer = self._sender(message, body)
        if peer is None:
            return
        self.links.taken(peer)
        with self._arriving:
            if self.links.life_of(body.rank) == body.back_in:
                self._forwarding.get(body.rank, set()).discard(peer)
