"""The members of a simulation: the runtime's own classes, without threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.runtime.members.member import Member
from slipstream.runtime.members.waiting import Waiter
from slipstream.testing.clock import VirtualClock
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import AnyBody, Message
from slipstream.types import Chunk, Spec, Values

FOREVER_S = 1e9
POISON = 0xFF  # four of them are a NaN
Tensors = tuple[bytes | None, ...]  # by tensor; None: no contribution, or no result
Owed = dict[int, np.ndarray[Any, np.dtype[np.float32]]]


@dataclass(frozen=True, slots=True)
class Event:
    """A message that was sent, or was taken by its receiver."""

    kind: str  # "sent" or "taken"
    source: str
    peer: str
    body: AnyBody
    at_s: float
    priority: int = 0


class SimulatedWaiter(Waiter):
    """A waiter that lets messages move; a wait that would never end reaches its limit at once.

    So does any wait while the stage decides what happens next (``waits()`` is False): the worker
    tries again later.
    """

    def __init__(self, name: str, move: Callable[[], bool], waits: Callable[[], bool]) -> None:
        super().__init__()
        self._name, self._move, self._waits = name, move, waits

    def wait(self, holds: Callable[[], bool], limit_s: float) -> bool:
        while self._waits() and not holds() and self.fault is None and self._move():
            pass
        return holds()

    def pause(self, seconds: float) -> None:
        if not self._move():
            raise RuntimeFault(f"{self._name} waits for a message that will never be sent")


class Trace:
    """A record of one member's messages in the events of the simulation."""

    def __init__(self, name: str, clock: VirtualClock, events: list[Event]) -> None:
        self._name, self._clock, self._events = name, clock, events

    def sent(self, peer: str, body: AnyBody, priority: int) -> None:
        self._events.append(Event("sent", self._name, peer, body, self._clock(), priority))

    def handled(self, message: Message[Any]) -> None:
        event = Event("taken", message.sender, self._name, message.body, self._clock())
        self._events.append(event)


class SimulatedMember(Member):
    """A member without threads, on virtual time; the stage delivers its messages.

    Args:
        name: The member's name.
        network: The network that connects it.
        clock: The time of the simulation.
        move: Delivers one message; returns False if none is in flight.
        waits: Returns False while a wait must give up at once.
        trace: The list to which events are appended.
    """

    def __init__(
        self,
        name: str,
        network: MemoryNetwork,
        clock: VirtualClock,
        *,
        move: Callable[[], bool],
        waits: Callable[[], bool],
        trace: list[Event],
    ) -> None:
        super().__init__(
            name,
            network.endpoint(name),
            silence_s=FOREVER_S,
            clock=clock,
            waiter=SimulatedWaiter(name, move, waits),
            trace=Trace(name, clock, trace),
        )

    def take(self, arrived: int) -> None:
        """Handle so many messages that have arrived, and all messages of this member to itself."""
        try:
            while self.pump.own_queue or arrived:
                arrived -= not self.pump.own_queue
                self.pump_once(0.0)
        except RuntimeFault as fault:
            self.fail(fault)

    def tick(self) -> None:
        """Send a heartbeat, if one is due."""
        self.pump.tick()


class ByteSlots:
    """The tensors of a worker. As in training, a mean overwrites the contribution, and weights from
    servers have their own memory."""

    def __init__(self, specs: Sequence[Spec], *, weights_return: bool = False) -> None:
        self._held = [zeros(spec) for spec in specs]
        self._gradients = [zeros(spec) for spec in specs] if weights_return else self._held
        self._is_present = [False] * len(specs)
        self._finished: set[int] = set()

    def begin(self, contributions: Sequence[bytes | None]) -> None:
        """Set a new round's contributions, by tensor; None where this worker has none."""
        self._finished.clear()
        for tensor, content in enumerate(contributions):
            self._is_present[tensor] = content is not None
            if content is not None:
                memoryview(self._gradients[tensor].data)[:] = content
            elif self._gradients is self._held:
                self._held[tensor].data[:] = POISON  # like new memory, which may hold anything

    def results(self) -> Tensors:
        """Return the results; None for tensors without a contribution."""
        return tuple(
            content if tensor in self._finished else None
            for tensor, content in enumerate(self.contents())
        )

    def contents(self) -> tuple[bytes, ...]:
        """Return all current tensors."""
        return tuple(values.data.tobytes() for values in self._held)

    def source(self, tensor: int) -> Values | None:
        return self._gradients[tensor] if self._is_present[tensor] else None

    def sink(self, tensor: int) -> Values:
        return self._held[tensor]

    def finish(self, tensor: int) -> None:
        self._finished.add(tensor)


def zeros(spec: Spec) -> Values:
    values = Values.empty(spec.numel, spec.dtype)
    values.data[:] = 0
    return values


def owed_by(plan: Plan, chunks: Sequence[Chunk], memories: Callable[[int], Sequence[Any]]) -> Owed:
    """Return what codecs hold back of these chunks, by tensor."""
    owed: Owed = {}
    for chunk in chunks:
        for segment, memory in zip(chunk.segments, memories(chunk.index), strict=True):
            if memory is not None:
                numel = plan.specs[segment.tensor].numel
                whole = owed.setdefault(segment.tensor, np.zeros(numel, np.float32))
                whole[segment.start : segment.stop] = memory
    return owed
