"""Messages to peers that each come once, in order, or are missed: numbered by link and life."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slipstream.errors import FrameRefused
from slipstream.runtime.exchange import rank_of
from slipstream.runtime.member import Member
from slipstream.transports.protocol import Ticket
from slipstream.transports.wire import AnyBody, Message
from slipstream.types import Buffer, Rank


class Numbered(Protocol):
    """A header that begins so."""

    @property
    def life(self) -> int: ...

    @property
    def number(self) -> int: ...


class NumberedLinks:
    """One worker's ends of all its links. A peer that was started again is in another life, in
    which its links begin anew.

    A link is closed when its peer has died, and opened by whoever has forgotten all that was meant
    for the dead one: what is sent in between goes nowhere.
    """

    def __init__(self, member: Member, life: int) -> None:
        self.life = life
        self.sent_bytes = 0
        self._member = member
        self._sending = threading.Lock()  # both threads send
        self._closed: set[Rank] = set()
        self._sent: Counter[Rank] = Counter()
        self._taken: Counter[Rank] = Counter()
        self._lives: dict[Rank, int] = {}  # of those who have been heard, or were said to be back

    def life_of(self, peer: Rank) -> int:
        return self._lives.get(peer, 0)

    def close(self, peer: Rank) -> None:
        with self._sending:
            self._closed.add(peer)

    def open(self, peer: Rank) -> None:
        with self._sending:
            self._closed.discard(peer)
            self._sent[peer] = 0

    def renew(self, peer: Rank, life: int) -> None:
        """A peer is in another life, in which nothing has come from it yet, unless it is known."""
        if self._lives.get(peer) != life:
            self._lives[peer] = life
            self._taken[peer] = 0

    def send(
        self,
        peer: Rank,
        kind: Callable[..., AnyBody],
        *fields: Any,
        frames: Sequence[Buffer] = (),
    ) -> Ticket | None:
        with self._sending:
            if peer in self._closed:
                return None
            body = kind(self.life, self._sent[peer], *fields)
            self._sent[peer] += 1
            self.sent_bytes += sum(memoryview(frame).nbytes for frame in frames)
            return self._member.send(f"rank {peer}", body, frames)

    def sender(self, message: Message, body: Numbered) -> Rank | None:
        """Whose it is, if it is the next on its link; ``taken`` says that it has been taken.

        Where one is missing the job ends, and the answer is None.
        """
        peer = rank_of(message.sender)
        expected = self._taken[peer]
        if body.life != self._lives.setdefault(peer, body.life):
            raise FrameRefused(f"a message of {message.sender} in another life")
        if body.number < expected:
            raise FrameRefused(f"message {body.number} of {message.sender} has come before")
        if body.number > expected:
            self._member.report(message.sender, f"message {expected} of its updates was lost")
            return None
        return peer

    def taken(self, peer: Rank) -> None:
        self._taken[peer] += 1
