"""Every worker's updates to every other one, a slice at a time, beside the training.

What a worker owes its peers accumulates; a slice leaves for a peer when the one before has left, so
a slow link makes slices fuller and never a queue. Slices are added to the weights as they arrive,
on the receiving thread.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
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
from slipstream.transports.wire import Message, Part, Tail, checksum
from slipstream.types import Rank

MESSAGE_VALUES = 1 << 18
LOOK_AGAIN_S = 0.001
SCHEME = "slices"


class Weights(Protocol):
    """All trained weights as one vector."""

    @property
    def numel(self) -> int: ...

    def add(self, start: int, values: Floats) -> None:
        """To the weights from ``start`` on; from any thread."""
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
    ) -> None:
        self.step = 0
        self.wait_s = 0.0
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.made = 0  # steps of this worker
        self.merged = 0  # how often a slice had to wait and grew fuller
        self._rank, self._slices, self._rule = rank, slices, rule
        self._member, self._pace = member, pace
        self.weights = weights
        self._limit_s = limit_s
        self._owed = self._rotated(peers)
        self._left_over: list[Debt] = []  # of the rotation before
        self._leaving: defaultdict[Rank, list[Ticket]] = defaultdict(list)
        self._sent_to: Counter[Rank] = Counter()  # messages
        self._taken_from: Counter[Rank] = Counter()
        self._lost: set[Rank] = set()  # who is still to be forgotten by the training thread
        self._heard = dict.fromkeys(peers, 0)  # steps that a peer is known to have made
        self._tails = dict.fromkeys(peers, 0)  # drains of a peer that have come to their end
        self._drains = 0  # begun
        self._told = 0  # of which everybody has been told that all has left
        self._final = False
        self._waited_s = 0.0
        self._begun_s = time.monotonic()
        member.on(Part, self._on_part)
        member.on(Tail, self._on_tail)

    @property
    def partitions(self) -> int:
        return self._owed.rotation.partitions

    @property
    def debts(self) -> list[Debt]:
        """What is owed to whom; each takes as much memory as the model."""
        return self._left_over + self._owed.debts

    def _rotated(self, peers: Collection[Rank]) -> Owed:
        rotation = Rotation(self._pace.partitions, self._slices.same_for_all)
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
        partitions = self._pace.stepped(self.wait_s - before_s, held_up)
        if partitions != self.partitions and not self._left_over:
            self._left_over = self._owed.debts
            self._owed = self._rotated(self._peers())

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
        self._final = final
        self._left_over += self._owed.debts
        self._owed = self._rotated(self._peers())

    def drained(self) -> bool:
        """Whether it has left, and everybody else's has come."""
        if self._left_over:
            return False
        if self._told < self._drains:
            self._told = self._drains
            for peer in self._peers():
                self._send(peer, Tail(self._sent_to[peer], self._drains, self._final))
        return not self._undrained()

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

    def _peers(self) -> list[Rank]:
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
                number = self._sent_to[peer]
                ticket = self._send(peer, Part(number, self.made, start + offset, last, crc), piece)
                if ticket is not None:
                    self._leaving[peer].append(ticket)

    def _send(self, peer: Rank, body: Part | Tail, *frames: Any) -> Ticket | None:
        self._sent_to[peer] += 1
        self.sent[SCHEME] += sum(frame.nbytes for frame in frames)
        return self._member.send(f"rank {peer}", body, frames)

    def _forget_the_lost(self) -> None:
        with self._member.changed:
            lost, self._lost = self._lost, set()
        for peer in lost:
            self._owed.forget(peer)
            self._pace.lose(f"rank {peer}")
            for debt in self._left_over:
                debt.peers.discard(peer)
        self._left_over = [debt for debt in self._left_over if debt.peers]

    def account(self) -> dict[str, Any]:
        """What was predicted of the links, and what they carried."""
        elapsed_s = time.monotonic() - self._begun_s
        return self._pace.account() | {
            "used_bytes_s": self.sent.total() / elapsed_s,
            "slices_merged": self.merged,
        }

    # ---- the receiving thread

    def lose(self, peer: Rank) -> None:
        """A peer has died: nobody waits for it, and nothing is kept for it."""
        with self._member.changed:
            self._heard.pop(peer, None)
            self._tails.pop(peer, None)
            self._lost.add(peer)
            self._member.changed.notify_all()

    def _sender(self, message: Message, number: int) -> Rank | None:
        """Whose it is, if it is the next on its link."""
        peer = rank_of(message.sender)
        if peer not in self._tails:
            raise FrameRefused(f"a slice from {message.sender}, which is no peer")
        expected = self._taken_from[peer]
        if number < expected:
            raise FrameRefused(f"message {number} of {message.sender} has come before")
        if number > expected:
            self._member.report(message.sender, f"message {expected} of its updates was lost")
            return None
        return peer

    def _on_part(self, message: Message) -> None:
        body = message.body
        assert isinstance(body, Part)
        peer = self._sender(message, body.number)
        if peer is None:
            return
        values = self._checked(body, message)
        self.weights.add(body.start, values)
        self.received[SCHEME] += values.nbytes
        self._taken_from[peer] += 1
        with self._member.changed:
            if body.last and peer in self._heard:
                self._heard[peer] = max(self._heard[peer], body.steps)
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
        peer = self._sender(message, body.number)
        if peer is None:
            return
        self._taken_from[peer] += 1
        with self._member.changed:
            self._tails[peer] = body.drain
            if body.final:
                self._heard.pop(peer, None)
            self._member.changed.notify_all()
