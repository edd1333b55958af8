"""Who plays in a simulation: the runtime's own members, workers and servers, without threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.errors import RuntimeFault
from slipstream.runtime.member import Member
from slipstream.strategy import Plan
from slipstream.testing.clock import VirtualClock
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.protocol import Ticket
from slipstream.transports.wire import AnyBody, Message
from slipstream.types import Buffer, Chunk, Spec, Values

FOREVER_S = 1e9
POISON = 0xFF  # four of them are no number
Tensors = tuple[bytes | None, ...]  # by tensor; None: no contribution, or no result
Owed = dict[int, np.ndarray[Any, np.dtype[np.float32]]]


@dataclass(frozen=True, slots=True)
class Event:
    """A message was sent, or was taken by its receiver."""

    kind: str  # "sent" or "taken"
    source: str
    peer: str
    body: AnyBody
    at_s: float
    priority: int = 0


class SimulatedMember(Member):
    """Waits by letting the network move; a wait that would never end is a WaitLimit at once.

    So is any wait while the stage decides what happens next: it asks again later.
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
        super().__init__(name, network.endpoint(name), silence_s=FOREVER_S, clock=clock)
        self._network = network
        self._move = move
        self._waits = waits
        self._trace = trace

    def send(
        self, peer: str, body: AnyBody, frames: Sequence[Buffer] = (), *, priority: int = 0
    ) -> Ticket | None:
        self._trace.append(Event("sent", self.name, peer, body, self.now, priority))
        return super().send(peer, body, frames, priority=priority)

    def _handle(self, message: Message) -> None:
        self._trace.append(Event("taken", message.sender, self.name, message.body, self.now))
        super()._handle(message)

    def take(self, arrived: int) -> None:
        """Handle what has arrived, and before and after it what this member tells itself."""
        try:
            while self._own or arrived:
                arrived -= not self._own
                self.pump_once(0.0)
        except RuntimeFault as fault:
            self.fail(fault)

    def tick(self) -> None:
        """Beat, if it is time to."""
        if self._clock() >= self._beat_at:
            self._beat()

    def wait_until(
        self,
        holds: Callable[[], bool],
        *,
        what: str,
        limit_s: float,
        missing: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        while self._waits() and not holds() and self.fault is None and self._move():
            pass
        super().wait_until(holds, what=what, limit_s=0.0, missing=missing)

    def pause(self, seconds: float) -> None:
        if not self._move():
            raise RuntimeFault(f"{self.name} waits for what will never leave")


class ByteSlots:
    """A worker's tensors. As in training, a mean is written over the contribution, and weights that
    servers send have memory of their own."""

    def __init__(self, specs: Sequence[Spec], *, weights_return: bool = False) -> None:
        self._held = [zeros(spec) for spec in specs]
        self._gradients = [zeros(spec) for spec in specs] if weights_return else self._held
        self._given = [False] * len(specs)
        self._settled: set[int] = set()

    def begin(self, contributions: Sequence[bytes | None]) -> None:
        """A new round's contributions, by tensor; None where this worker has none."""
        self._settled.clear()
        for tensor, content in enumerate(contributions):
            self._given[tensor] = content is not None
            if content is not None:
                memoryview(self._gradients[tensor].data)[:] = content
            elif self._gradients is self._held:
                self._held[tensor].data[:] = POISON  # as new memory, which may hold anything

    def results(self) -> Tensors:
        """What came back; None for tensors that nobody contributed to."""
        return tuple(
            content if tensor in self._settled else None
            for tensor, content in enumerate(self.contents())
        )

    def contents(self) -> tuple[bytes, ...]:
        """All there is, whenever it came."""
        return tuple(held.data.tobytes() for held in self._held)

    def source(self, tensor: int) -> Values | None:
        return self._gradients[tensor] if self._given[tensor] else None

    def sink(self, tensor: int) -> Values:
        return self._held[tensor]

    def settle(self, tensor: int) -> None:
        self._settled.add(tensor)


def zeros(spec: Spec) -> Values:
    values = Values.empty(spec.numel, spec.dtype)
    values.data[:] = 0
    return values


def owed_by(plan: Plan, chunks: Sequence[Chunk], memories: Callable[[int], Sequence[Any]]) -> Owed:
    """What codecs remember of these chunks, by tensor."""
    owed: Owed = {}
    for chunk in chunks:
        for segment, memory in zip(chunk.segments, memories(chunk.index), strict=True):
            if memory is not None:
                numel = plan.specs[segment.tensor].numel
                whole = owed.setdefault(segment.tensor, np.zeros(numel, np.float32))
                whole[segment.start : segment.stop] = memory
    return owed
