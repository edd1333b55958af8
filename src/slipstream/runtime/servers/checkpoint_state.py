"""What workers read from servers for checkpoints, and restore: residuals or optimizer state."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np

from slipstream.errors import FrameRefused
from slipstream.runtime.exchange.aggregator import Aggregator, Updater
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.servers.senders import asking_rank, from_hub, require_coordinator
from slipstream.transports.wire import Dump, Fetch, Load, Message, State, checksum
from slipstream.types import Node


class Residuals:
    """The residuals, by chunk, of a server that only averages gradients."""

    def __init__(self, aggregator: Aggregator, member: Endpoint) -> None:
        self._aggregator, self._member = aggregator, member
        member.on(Fetch, self._on_fetch)
        member.on(State, from_hub(self._on_state))

    def _of(self, chunk: int) -> list[Any]:
        """The residuals of a chunk's segments, without segments whose codec keeps none."""
        return [memory for memory in self._aggregator.memories(chunk) if memory is not None]

    def _on_fetch(self, message: Message[Fetch]) -> None:
        asking_rank(message, self._aggregator.plan.cluster)
        residuals = self._of(message.body.chunk)
        entries = [(segment, "residual", "float32") for segment in range(len(residuals))]
        frames = [residual.tobytes() for residual in residuals]
        body = State(message.body.chunk, entries, checksum(frames))
        self._member.send(message.sender, body, frames)

    def _on_state(self, message: Message[State]) -> None:
        residuals = self._of(message.body.chunk)
        sizes = [residual.nbytes for residual in residuals]
        if [memoryview(frame).nbytes for frame in message.frames] != sizes:
            raise FrameRefused(f"residuals of chunk {message.body.chunk} have other sizes")
        if checksum(message.frames) != message.body.crc:
            raise FrameRefused(f"checksum of chunk {message.body.chunk}'s residuals does not match")
        for residual, frame in zip(residuals, message.frames, strict=True):
            residual.view(np.uint8)[:] = np.frombuffer(frame, np.uint8)


class StatefulUpdater(Updater, Protocol):
    """An optimizer that runs at a server and can be saved: the user's, or an outer one."""

    def load(self, message: Message[Load]) -> None: ...

    def load_state(self, message: Message[State]) -> None: ...

    def fetch(self, message: Message[Fetch]) -> tuple[State, list[bytes]]: ...

    def state(self, chunk: int) -> tuple[State, list[bytes]]: ...


class OptimizerState:
    """Weights and optimizer state of a server that updates."""

    def __init__(
        self, node: Node, updater: StatefulUpdater, aggregator: Aggregator, member: Endpoint
    ) -> None:
        self._node, self._updater = node, updater
        self._aggregator, self._member = aggregator, member
        member.on(Load, from_hub(updater.load))
        member.on(State, from_hub(updater.load_state))
        member.on(Fetch, self._on_fetch)
        member.on(Dump, self._on_dump)

    def _on_fetch(self, message: Message[Fetch]) -> None:
        body, frames = self._updater.fetch(message)
        asking_rank(message, self._aggregator.plan.cluster)
        self._member.send(message.sender, body, frames)

    def _on_dump(self, message: Message[Dump]) -> None:
        """Send every chunk's state to a worker, as of the same decision at all servers."""
        plan, rank = self._aggregator.plan, message.body.rank
        require_coordinator(message)
        if rank >= plan.cluster.ranks:
            raise FrameRefused(f"there is no rank {rank}")
        for chunk in plan.chunks_of(self._node):
            body, frames = self._updater.state(chunk.index)
            rounds = self._aggregator.round(plan.unit_of(chunk))
            numbered = msgspec.structs.replace(body, round=rounds)
            self._member.send(f"rank {rank}", numbered, frames)
