"""Every worker's updates to every other one, a slice at a time, beside the training.

What a worker owes its peers accumulates; a slice leaves for a peer when the one before has left, so
a slow link makes slices fuller and never a queue. Slices are added to the weights as they arrive,
on the receiving thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from slipstream.codecs.partition import Debt, Floats, Owed, Rotation
from slipstream.consistency.reach import WithinReach
from slipstream.errors import FrameRefused, WaitLimit
from slipstream.planning.slices import Slices
from slipstream.runtime.exchange import rank_of
from slipstream.runtime.member import Member
from slipstream.runtime.pace import Pace
from slipstream.transports.protocol import Ticket
from slipstream.transports.wire import Adopted, Message, Part, Tail, Welcome, checksum
from slipstream.types import Buffer, Rank

MESSAGE_VALUES = 1 << 18
LOOK_AGAIN_S = 0.001
SCHEME = "slices"


Numbered = Callable[..., Part | Tail | Adopted]


@dataclass(frozen=True, slots=True)
class Applicant:
    """A worker that was started again, for the ``life``-th time, and where it listens now."""

    rank: Rank
    address: str
    life: int


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
    """One worker's end of all its links; implements ``Exchange``."""

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
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.made = 0  # steps of this worker
        self.merged = 0  # how often a slice had to wait and grew fuller
        self.life = life  # how often this worker was started again
        self.admit: Callable[[Applicant], None] = lambda applicant: None
        self._rank, self._slices, self._rule = rank, slices, rule
        self._member = member
        self.pace = pace
        self.weights = weights
        self._limit_s = limit_s
        self._owed = self._rotated(peers)
        self._left_over: list[Debt] = []  # of the rotation before
        self._leaving: defaultdict[Rank, list[Ticket]] = defaultdict(list)
        self._sent_to: Counter[Rank] = Counter()  # messages
        self._taken_from: Counter[Rank] = Counter()
        self._numbering = threading.Lock()
        # What the receiving thread has heard, for the training thread to act on.
        self._lost: set[Rank] = set()
        self._newcomers: list[Rank] = []
        self._applicants: list[Applicant] = []
        self._lives = dict.fromkeys(peers, 0)
        # By newcomer, at rank 0: whose updates it gets from here, until they send them themselves.
        self._forwarding: dict[Rank, set[Rank]] = {}
        self._arriving = threading.Lock()
        # Steps that a peer is known to have made; of one that was there before, nothing yet.
        self._heard = {} if life else dict.fromkeys(peers, 0)
        self._tails = dict.fromkeys(peers, 0)  # drains of a peer that have come to their end
        self._drains = 0  # begun
        self._told = 0  # of which everybody has been told that all has left
        self._draining = self._final = False
        self._waited_s = 0.0
        self._begun_s = time.monotonic()
        member.on(Part, self._on_part)
        member.on(Tail, self._on_tail)
        member.on(Adopted, self._on_adopted)

    @property
    def partitions(self) -> int:
        return self._owed.rotation.partitions

    @property
    def debts(self) -> list[Debt]:
        """What is owed to whom; each takes as much memory as the model."""
        return self._left_over + self._owed.debts

    def _rotated(self, peers: Collection[Rank]) -> Owed:
        rotation = Rotation(self.pace.partitions, self._slices.same_for_all)
        return Owed(rotation, self._rank, peers, self.weights.numel)

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
            self._left_over = self._owed.debts
            self._owed = self._rotated(self.peers())

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        """Until the next step may begin; slices that had to wait leave meanwhile."""
        self._until(self.may_begin, "another worker's step", self._behind)

    def drain(self, *, final: bool = False) -> None:
        """Until every worker has every update of every worker; all of them call it."""
        self.begin_drain(final=final)
        self._until(self.drained, "everybody's last updates", self._undrained)

    def begin_drain(self, *, final: bool = False) -> None:
        """All that is owed is to leave; ``final``: this worker makes no more steps."""
        self._drains += 1
        self._draining, self._final = True, final
        self._left_over += self._owed.debts
        self._owed = self._rotated(self.peers())

    def drained(self) -> bool:
        """Whether it has left, and everybody else's has come."""
        if self._left_over:
            return False
        if self._told < self._drains:
            self._told = self._drains
            for peer in self.peers():
                self._send(peer, Tail, self._drains, self._final)
        self._draining = bool(self._undrained())
        return not self._draining

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
        begun_s = time.monotonic()
        while not self._holds(holds):
            self._member.check()
            if time.monotonic() - begun_s > self._limit_s:
                raise WaitLimit(what, self._limit_s, missing(), self._member.last_refusal)
            self.offer()
            self._member.pause(LOOK_AGAIN_S)
        self.wait_s += time.monotonic() - begun_s

    def _holds(self, holds: Callable[[], bool]) -> bool:
        with self._member.changed:
            return holds()

    def peers(self) -> list[Rank]:
        """Those that live; some may train no more, but take what the others do."""
        with self._member.changed:
            return sorted(self._tails)

    def may_begin(self) -> bool:
        return self._rule.may_begin(self.made, self._heard, self.partitions)

    def _behind(self) -> list[str]:
        slowest = min(self._heard.values())
        return [f"rank {peer}" for peer, steps in self._heard.items() if steps == slowest]

    def _undrained(self) -> list[str]:
        return [f"rank {peer}" for peer, at in self._tails.items() if at < self._drains]

    def offer(self) -> bool:
        """Send what is due wherever the slice before has left; whether all could be sent."""
        self._forget_the_lost()
        self._take_in()
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
                ticket = self._send(peer, Part, *fields, frames=[piece])
                if ticket is not None:
                    self._leaving[peer].append(ticket)

    def _send(
        self, peer: Rank, kind: Numbered, *fields: Any, frames: Sequence[Buffer] = ()
    ) -> Ticket | None:
        with self._numbering:
            body = kind(self.life, self._sent_to[peer], *fields)
            self._sent_to[peer] += 1
            self.sent[SCHEME] += sum(memoryview(frame).nbytes for frame in frames)
            return self._member.send(f"rank {peer}", body, frames)

    def _forget_the_lost(self) -> None:
        with self._member.changed:
            lost, self._lost = self._lost, set()
        for peer in lost:
            self._leaving[peer].clear()
            self._sent_to[peer] = 0
            self._owed.forget(peer)
            self.pace.lose(f"rank {peer}")
            for debt in self._left_over:
                debt.peers.discard(peer)
        self._left_over = [debt for debt in self._left_over if debt.peers]

    # ---- who comes back

    def _take_in(self) -> None:
        """Those who are back: rank 0 gives them its weights, the others what they owe rank 0.

        What a worker has sent to rank 0 and is not in those weights yet, rank 0 passes on. So who
        is back has every update once: in the weights, passed on, owed to rank 0, or made since.
        """
        with self._member.changed:
            newcomers, self._newcomers = self._newcomers, []
            applicants: list[Applicant] = []
            if not self._draining and not self._final:
                applicants, self._applicants = self._applicants, []
        for peer in newcomers:
            owed = [debt.total for debt in self.debts if 0 in debt.peers]
            self._include(peer, np.sum([np.zeros(self.weights.numel, np.float32), *owed], axis=0))
            self._send(0, Adopted, peer, self._lives[peer])
        for applicant in applicants:
            self._readmit(applicant)

    def _readmit(self, applicant: Applicant) -> None:
        """At rank 0: let it in, tell everybody, and send it the weights."""
        rank = applicant.rank
        with self._arriving:
            self._forwarding[rank] = set(self.peers()) - {rank}
            snapshot = self.weights.whole()
        self.know(rank, applicant.life, self._drains)
        self.admit(applicant)
        self._include(rank, snapshot)

    def _include(self, peer: Rank, owed: Floats) -> None:
        self._left_over.append(Debt(0, {peer}, owed))
        self._owed.include(peer)
        self.pace.gain(f"rank {peer}")

    def catch_up(self, welcome: Welcome) -> None:
        """This worker is the one that is back, and has the weights of so many steps."""
        self.made = self.step = self._member.round = welcome.steps
        self._drains = self._told = welcome.drains
        self.pace.bytes_s = welcome.bytes_s
        with self._member.changed:
            absent = [peer for peer in self._tails if peer not in welcome.peers]
            self._tails.update(dict.fromkeys(self._tails, welcome.drains))
            known = [f"rank {peer}" for peer in absent]
            self._member.lost.extend(name for name in known if name not in self._member.lost)
        for peer in absent:
            self.lose(peer)

    def heard_of(self, peer: Rank) -> bool:
        """Whether a whole slice of a peer's has come."""
        return peer in self._heard

    @property
    def drains(self) -> int:
        return self._drains

    def account(self) -> dict[str, Any]:
        """What was predicted of the links, and what they carried."""
        elapsed_s = time.monotonic() - self._begun_s
        return self.pace.account() | {
            "used_bytes_s": self.sent.total() / elapsed_s,
            "slices_merged": self.merged,
        }

    # ---- the receiving thread

    def lose(self, peer: Rank) -> None:
        """A peer has died: nobody waits for it, and nothing is kept for it."""
        with self._arriving:
            self._forwarding.pop(peer, None)
            for missing in self._forwarding.values():
                missing.discard(peer)
        with self._member.changed:
            self._heard.pop(peer, None)
            self._tails.pop(peer, None)
            self._lost.add(peer)
            self._newcomers = [each for each in self._newcomers if each != peer]
            self._member.changed.notify_all()

    def know(self, peer: Rank, life: int, drains: int) -> None:
        """A peer is back: its updates count from now on."""
        with self._member.changed:
            self._lives[peer] = life
            self._taken_from[peer] = 0
            self._tails[peer] = drains

    def expect_back(self, peer: Rank, life: int, drains: int) -> None:
        """The same, and the training thread is to send it what it lacks."""
        self.know(peer, life, drains)
        with self._member.changed:
            self._newcomers.append(peer)

    def apply(self, applicant: Applicant) -> None:
        """At rank 0: one wants to be let in, which is done between steps."""
        with self._member.changed:
            self._applicants.append(applicant)

    def _sender(self, message: Message, body: Part | Tail | Adopted) -> Rank | None:
        """Whose it is, if it is the next on its link."""
        peer = rank_of(message.sender)
        if peer not in self._tails:
            raise FrameRefused(f"a slice from {message.sender}, which is no peer")
        expected = self._taken_from[peer]
        if body.life != self._lives[peer] or body.number < expected:
            raise FrameRefused(f"message {body.number} of {message.sender} has come before")
        if body.number > expected:
            self._member.report(message.sender, f"message {expected} of its updates was lost")
            return None
        return peer

    def _on_part(self, message: Message) -> None:
        body = message.body
        assert isinstance(body, Part)
        peer = self._sender(message, body)
        if peer is None:
            return
        values = self._checked(body, message)
        with self._arriving:
            self.weights.add(body.start, values)
            for newcomer, missing in self._forwarding.items():
                if peer in missing:
                    fields = (body.steps, body.start, False, body.crc)
                    self._send(newcomer, Part, *fields, frames=message.frames)
        self.received[SCHEME] += values.nbytes
        self._taken_from[peer] += 1
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
        self._taken_from[peer] += 1
        with self._member.changed:
            self._tails[peer] = body.drain
            if body.final:
                self._heard.pop(peer, None)
            self._member.changed.notify_all()

    def _on_adopted(self, message: Message) -> None:
        body = message.body
        assert isinstance(body, Adopted)
        peer = self._sender(message, body)
        if peer is None:
            return
        self._taken_from[peer] += 1
        with self._arriving:
            if self._lives.get(body.rank) == body.back_in:
                self._forwarding.get(body.rank, set()).discard(peer)
