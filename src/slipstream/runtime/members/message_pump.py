"""The message pump: one thread takes a member's messages one by one and calls their handlers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from slipstream.errors import FrameRefused
from slipstream.runtime.process.event_log import log_event
from slipstream.transports.protocol import Ticket, Transport
from slipstream.transports.wire import AnyBody, Message
from slipstream.types import Buffer

TICK_S = 0.5
JOIN_S = 10.0  # limit for the thread to end
Handler = Callable[[Message[Any]], None]
B = TypeVar("B")
logger = logging.getLogger(__name__)


def drop(message: Message[Any]) -> None:
    """Ignore a message whose receiver has closed."""


class MessageTrace(Protocol):
    """A record of every message that a member sends, and of every one that it handles."""

    def sent(self, peer: str, body: AnyBody, priority: int) -> None:
        """Record that a message is sent."""

    def handled(self, message: Message[Any]) -> None:
        """Record that a message is about to be handled."""


class MessagePump:
    """Messages in and out of one member.

    Args:
        name: The member's name.
        transport: The transport of its messages.
        clock: Returns the time in seconds.
        trace: Called with every message, if there is one.

    Attributes:
        admit: Called before a message's handler; False drops the message, FrameRefused refuses it.
        on_refused: Called with each message that was refused, and the error.
        beat: Called after each tick, with how late the tick was in seconds.
        refused: The number of messages that were refused.
        last_refusal: The sender of the last refused message, and the reason.
        tick_at: The time at which ticks are next due.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        clock: Callable[[], float],
        trace: MessageTrace | None = None,
    ) -> None:
        self.name, self.transport, self.clock = name, transport, clock
        self.admit: Callable[[Message[Any]], bool] = lambda message: True
        self.on_refused: Callable[[Message[Any], FrameRefused], None] = lambda message, error: None
        self.beat: Callable[[float], None] = lambda late_s: None
        self.refused = 0
        self.last_refusal = ""
        self.tick_at = clock()
        self._trace = trace
        self._ticks: list[Callable[[], object]] = []
        self._own: deque[Message[Any]] = deque()
        self._handlers: dict[tuple[type[Any], int], Handler] = {}
        self._of_any_pair: dict[type[Any], Handler] = {}
        self._stopping = False
        self._thread: threading.Thread | None = None

    def on(self, kind: type[B], handler: Callable[[Message[B]], None], *, pair: int = 0) -> None:
        """Set the handler of one pair's messages of one type; it runs on the pump's thread."""
        self._handlers[kind, pair] = handler

    def stop_handling(
        self, kind: type[B], handler: Callable[[Message[B]], None], *, pair: int = 0
    ) -> None:
        """Drop messages that this handler would get, and release it, since it may hold much memory.

        Messages in flight when its owner closes are no mistake of their senders. Nothing happens if
        another handler has replaced it.
        """
        if self._handlers.get((kind, pair)) == handler:
            self._handlers[kind, pair] = drop

    def on_any_pair(self, kind: type[B], handler: Callable[[Message[B]], None]) -> None:
        """Set the handler of messages of one type for pairs without a handler."""
        self._of_any_pair[kind] = handler

    def on_tick(self, call: Callable[[], object]) -> None:
        """Add a call that the pump's thread makes about every ``TICK_S`` seconds."""
        self._ticks.append(call)

    def send(
        self,
        peer: str,
        body: AnyBody,
        frames: Sequence[Buffer] = (),
        *,
        priority: int = 0,
        pair: int = 0,
    ) -> Ticket | None:
        """Send to a peer. A message to the member itself joins its own queue, without a ticket."""
        if self._trace is not None:
            self._trace.sent(peer, body, priority)
        if peer != self.name:
            return self.transport.send(peer, body, frames, priority=priority, pair=pair)
        self._own.append(Message(peer, body, frames, self.transport.process, pair))
        self.transport.wake()
        return None

    def handle_later(self, message: Message[Any]) -> None:
        """Handle a message again, after the messages that are in the member's own queue now."""
        self._own.append(message)

    @property
    def own_queue(self) -> int:
        """The number of messages of the member to itself that are waiting."""
        return len(self._own)

    def start(self, on_error: Callable[[Exception], None]) -> None:
        """Run on a separate thread; ``on_error`` gets an error that ends it early."""
        self._thread = threading.Thread(target=self.run, args=[on_error], daemon=True)
        self._thread.name = f"slipstream {self.name}"
        self._thread.start()

    def run(self, on_error: Callable[[Exception], None]) -> None:
        """Handle messages and ticks until stopped."""
        try:
            while not self._stopping:
                self.run_once(max(0.0, self.tick_at - self.clock()))
        except Exception as error:
            on_error(error)

    def run_once(self, timeout_s: float) -> None:
        """Handle at most one message, then ticks if they are due."""
        message = self._own.popleft() if self._own else self.transport.receive(timeout_s)
        if message is not None:
            self._handle(message)
        self.tick()

    def tick(self) -> None:
        """Call what ``on_tick`` has added, and beat, if ticks are due."""
        now = self.clock()
        if now < self.tick_at:
            return
        late_s, self.tick_at = now - self.tick_at, now + TICK_S
        for call in self._ticks:
            call()
        self.beat(late_s)

    def stop(self, linger_s: Callable[[], float]) -> None:
        """End the thread, and close the transport after up to ``linger_s()`` for its queue."""
        self._stopping = True
        self.transport.wake()
        if self._thread is not None:
            self._thread.join(timeout=JOIN_S)
        self.transport.close(linger_s())

    def _handle(self, message: Message[Any]) -> None:
        if self._trace is not None:
            self._trace.handled(message)
        kind = type(message.body)
        try:
            if not self.admit(message):
                return
            handler = self._handlers.get((kind, message.pair)) or self._of_any_pair.get(kind)
            if handler is None:
                of_pair = f" for pair {message.pair}" if message.pair else ""
                raise FrameRefused(f"{self.name} takes no {kind.__name__}{of_pair}")
            handler(message)
        except FrameRefused as error:
            self.refused += 1
            self.last_refusal = f"{message.sender}: {error}"
            log_event(
                logger,
                "message_refused",
                level=logging.DEBUG,
                member=self.name,
                kind=kind.__name__,
                sender=message.sender,
                reason=str(error),
            )
            self.on_refused(message, error)
