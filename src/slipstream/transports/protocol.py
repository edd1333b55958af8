"""The interface between the code that decides and the code that sends bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from slipstream.transports.wire import AnyBody, Message
from slipstream.types import Buffer

# Priority of heartbeats and faults: these have their own queue, so that seconds of gradients queued
# on a slow link do not look like silence. They keep no order with other messages.
CONTROL = -1_000_000


class Ticket(Protocol):
    """A report of when a message's frames may be changed again."""

    @property
    def done(self) -> bool:
        """True if the frames may be changed."""


class Transport(Protocol):
    """An endpoint that sends to members by name.

    ``send`` may be called from any thread, the other methods from one.
    """

    @property
    def address(self) -> str:
        """The address at which peers reach this transport."""

    @property
    def process(self) -> int:
        """The number of this process, which goes with every message; see ``wire.Envelope``."""
        ...

    def connect(self, peer: str, address: str) -> None:
        """Set a peer's address; a new address closes the old link."""

    def send(
        self,
        peer: str,
        body: AnyBody,
        frames: Sequence[Buffer] = (),
        *,
        priority: int = 0,
        pair: int = 0,
    ) -> Ticket:
        """Queue a message; its frames must stay unchanged until the ticket is done."""
        ...

    def receive(self, timeout_s: float) -> Message[Any] | None:
        """Return the next message, or None if none comes in time."""

    def link_alive(self, peer: str) -> bool:
        """Return whether the link still answers, even if the peer's program sends nothing."""
        ...

    def delivered(self, peer: str) -> tuple[int, float]:
        """Return the bytes that have arrived at a peer so far, and the seconds in which data was in
        flight; from any thread. Both are 0 if that is not known."""
        ...

    def link_refused(self, peer: str) -> bool:
        """Return whether the peer's host refuses connections to its port: the peer has died."""
        ...

    def wake(self) -> None:
        """Make a ``receive`` on another thread return."""
        ...

    def close(self, linger_s: float) -> None:
        """Free all resources, after up to ``linger_s`` for queued messages."""
        ...
