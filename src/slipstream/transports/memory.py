"""Messages within one thread, in an order that a seed decides: for tests and simulation."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import FrameRefused
from slipstream.transports.wire import AnyBody, Message, decode_header, encode_header
from slipstream.types import Buffer

SCHEME = "memory://"


@dataclass(slots=True)
class DeliveryTicket:
    """A ticket that is done when the message has been delivered."""

    done: bool = False


@dataclass(order=True, slots=True)
class Waiting:
    """A message on a link; sorts by urgency, then by age."""

    priority: int
    order: int
    header: bytes = field(compare=False)
    frames: Sequence[Buffer] = field(compare=False)
    ticket: DeliveryTicket = field(compare=False)
    address: str | None = field(compare=False)  # the peer's address when it was sent


class MemoryNetwork:
    """Links between endpoints; ``deliver`` moves one message, the most urgent of its link.

    Frames are read at delivery, not when sent, as on a real link.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._order = itertools.count()
        self._links: defaultdict[tuple[str, str], list[Waiting]] = defaultdict(list)
        self._endpoints: dict[str, MemoryTransport] = {}

    def endpoint(self, name: str) -> MemoryTransport:
        """Return the transport of a member, which the first call creates."""
        return self._endpoints.setdefault(name, MemoryTransport(name, self))

    def post(
        self,
        source: str,
        peer: str,
        header: bytes,
        frames: Sequence[Buffer],
        priority: int,
        address: str | None = None,
    ) -> DeliveryTicket:
        """Queue a message on a link."""
        waiting = Waiting(priority, next(self._order), header, frames, DeliveryTicket(), address)
        heapq.heappush(self._links[source, peer], waiting)
        return waiting.ticket

    def cut(self, source: str, peer: str) -> None:
        """Drop the messages in flight."""
        self._links[source, peer].clear()

    def deliver(self) -> str | None:
        """Move one message over a random busy link; returns its receiver, None if all are idle."""
        busy = sorted(link for link, waiting in self._links.items() if waiting)
        if not busy:
            return None
        source, peer = self._random.choice(busy)
        waiting = heapq.heappop(self._links[source, peer])
        if waiting.address is not None and waiting.address != self._endpoints[peer].address:
            return self.deliver()  # its listener has closed
        frames = tuple(bytes(memoryview(frame)) for frame in waiting.frames)
        waiting.ticket.done = True
        self._endpoints[peer].arrive(waiting.header, frames)
        return peer


class MemoryTransport:
    """One endpoint of a ``MemoryNetwork``; implements ``Transport``."""

    def __init__(self, name: str, network: MemoryNetwork) -> None:
        self.name = name
        self.process = 0
        self.address = f"{SCHEME}{name}"
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._network = network
        self._inbox: deque[Message[Any]] = deque()
        self._peers: dict[str, str] = {}

    def connect(self, peer: str, address: str) -> None:
        if self._peers.get(peer, address) != address:
            self._network.cut(self.name, peer)
        self._peers[peer] = address

    def send(
        self,
        peer: str,
        body: AnyBody,
        frames: Sequence[Buffer] = (),
        *,
        priority: int = 0,
        pair: int = 0,
    ) -> DeliveryTicket:
        if peer not in self._peers:
            raise KeyError(peer)
        header = encode_header(self.name, body, self.process, pair)
        self.sent[peer] += len(header) + sum(memoryview(frame).nbytes for frame in frames)
        known = self._peers[peer]
        address = known if known.startswith(SCHEME) else None  # invented by a test: any
        return self._network.post(self.name, peer, header, frames, priority, address)

    def arrive(self, header: bytes, frames: Sequence[Buffer]) -> None:
        """Take a message from the network; one that cannot be read is counted."""
        try:
            envelope = decode_header(header)
        except FrameRefused as error:
            self.refused[type(error).__name__] += 1
            return
        size = len(header) + sum(memoryview(frame).nbytes for frame in frames)
        self.received[envelope.sender] += size
        process, pair = envelope.process, envelope.pair
        self._inbox.append(Message(envelope.sender, envelope.body, frames, process, pair))

    def receive(self, timeout_s: float) -> Message[Any] | None:
        """Return the next message; let the network move while there is none."""
        while not self._inbox and self._network.deliver():
            pass
        return self._inbox.popleft() if self._inbox else None

    def link_alive(self, peer: str) -> bool:
        """Return False: there is no link below the messages that could be tested."""
        return False

    def delivered(self, peer: str) -> tuple[int, float]:
        return 0, 0.0

    def link_refused(self, peer: str) -> bool:
        return False

    def wake(self) -> None:
        """Do nothing: there is only one thread."""

    def close(self, linger_s: float) -> None:
        self._peers.clear()
