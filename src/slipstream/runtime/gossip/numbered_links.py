"""Numbered messages to peers: each arrives once and in order, or its loss is detected."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.errors import FrameRefused
from slipstream.runtime.members.member import Member
from slipstream.transports.protocol import Ticket
from slipstream.transports.wire import AnyBody, HandoverDone, Message, Part, Tail
from slipstream.types import Buffer, Rank, rank_of


class NumberedLinks:
    """One worker's ends of all its links.

    A restarted peer has another incarnation number, and its links count from 0 again.

    A link is closed when its peer has died. The training thread opens it again when it has dropped
    everything that had accumulated for the dead peer; messages in between are not sent.
    """

    def __init__(self, member: Member, incarnation: int) -> None:
        self.incarnation = incarnation
        self.sent_bytes = 0
        self._member = member
        self._sending = threading.Lock()  # both threads send
        self._closed: set[Rank] = set()
        self._sent: Counter[Rank] = Counter()
        self._num_received: Counter[Rank] = Counter()
        # Of peers that have sent a message, or were reported as back.
        self._incarnations: dict[Rank, int] = {}

    def incarnation_of(self, peer: Rank) -> int:
        return self._incarnations.get(peer, 0)

    def close(self, peer: Rank) -> None:
        with self._sending:
            self._closed.add(peer)

    def open(self, peer: Rank) -> None:
        with self._sending:
            self._closed.discard(peer)
            self._sent[peer] = 0

    def renew(self, peer: Rank, incarnation: int) -> None:
        """Count from 0 again if the peer has an incarnation number that is not known yet."""
        if self._incarnations.get(peer) != incarnation:
            self._incarnations[peer] = incarnation
            self._num_received[peer] = 0

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
            body = kind(self.incarnation, self._sent[peer], *fields)
            self._sent[peer] += 1
            self.sent_bytes += sum(memoryview(frame).nbytes for frame in frames)
            return self._member.send(f"rank {peer}", body, frames)

    def sender(self, message: Message[Any], body: Part | Tail | HandoverDone) -> Rank | None:
        """Return the sender's rank if the message is the next on its link; then call ``taken``.

        If a message is missing, the job ends, and the result is None.
        """
        peer = rank_of(message.sender)
        expected = self._num_received[peer]
        if body.incarnation != self._incarnations.setdefault(peer, body.incarnation):
            raise FrameRefused(f"a message of {message.sender} in another incarnation")
        if body.number < expected:
            raise FrameRefused(f"message {body.number} of {message.sender} has come before")
        if body.number > expected:
            self._member.report(message.sender, f"message {expected} of its updates was lost")
            return None
        return peer

    def taken(self, peer: Rank) -> None:
        self._num_received[peer] += 1
