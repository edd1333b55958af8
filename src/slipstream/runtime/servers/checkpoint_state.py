"""What workers read from servers for checkpoints, and restore: residuals or optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from slipstream.errors import FrameRefused
from slipstream.runtime.exchange.aggregator import Aggregator, Updater
from slipstream.runtime.exchange.transfer import Arrival, Transfer
from slipstream.runtime.files.state_entries import (
    FIRST_WEIGHTS,
    PUBLISHED,
    RESIDUAL,
    STATE,
    WEIGHTS,
    room_for,
    room_in,
)
from slipstream.runtime.members.member import HUB
from slipstream.runtime.servers.senders import asking_rank, require_coordinator
from slipstream.transports.wire import Fetch, Message, SnapshotDue
from slipstream.types import Buffer, Chunk, Entry, Node, Rank


class ServerResiduals:
    """The residuals, by chunk, of a server that only averages gradients."""

    def __init__(self, node: Node, aggregator: Aggregator, transfer: Transfer) -> None:
        self._aggregator, self._transfer = aggregator, transfer
        self._chunks = [c for c in aggregator.plan.chunks_of(node) if self._of(c.index)]
        transfer.serve(RESIDUAL, self._on_fetch)
        for chunk in self._chunks:
            room = partial(room_in, chunk, "float32")
            transfer.expect(Arrival(HUB, PUBLISHED, chunk.index, room, done=self._restore))

    def _of(self, chunk: int) -> list[Any]:
        """The residuals of a chunk's segments; none if the codec keeps none."""
        return [memory for memory in self._aggregator.memories(chunk) if memory is not None]

    def _on_fetch(self, message: Message[Fetch]) -> None:
        asking_rank(message, self._aggregator.plan.cluster)
        for chunk in self._chunks:
            frames = [residual.tobytes() for residual in self._of(chunk.index)]
            self._transfer.send(message.sender, PUBLISHED, chunk.index, frames)

    def _restore(self, arrival: Arrival) -> None:
        for residual, saved in zip(self._of(arrival.number), arrival.memory, strict=True):
            residual.view(np.uint8)[:] = saved


class HeldChunk(Protocol):
    """Weights and optimizer state of one chunk."""

    def load(self, weights: Sequence[Buffer], *, anew: bool) -> None:
        """Take weights, by segment; ``anew``: averages begin with them."""

    def load_state(self, entries: Sequence[Entry], values: Sequence[Buffer]) -> None:
        """Replace all of the optimizer's state, or refuse entries that it does not keep."""

    def state(self) -> tuple[list[Entry], list[bytes]]:
        """Copies of weights, averages and the optimizer's state."""
        ...


class StatefulUpdater(Updater, Protocol):
    """An optimizer that runs at a server and can be saved: the user's, or an outer one."""

    @property
    def chunks(self) -> Mapping[int, HeldChunk]: ...


class ServerOptimizerState:
    """Weights and optimizer state of a server that updates.

    Args:
        node: This server.
        updater: Holds the state of each chunk.
        aggregator: Counts the updates.
        transfer: Sends and receives the state.
    """

    def __init__(
        self, node: Node, updater: StatefulUpdater, aggregator: Aggregator, transfer: Transfer
    ) -> None:
        self._plan, self._updater = aggregator.plan, updater
        self._aggregator, self._transfer = aggregator, transfer
        self._chunks = self._plan.chunks_of(node)
        transfer.serve(STATE, self._on_fetch)
        transfer.member.on(SnapshotDue, self._on_snapshot_due)
        for chunk in self._chunks:
            weights = partial(room_in, chunk, chunk.dtype)
            for name, room in (
                (FIRST_WEIGHTS, weights),
                (WEIGHTS, weights),
                (STATE, partial(room_for, chunk)),
            ):
                transfer.expect(Arrival(HUB, name, chunk.index, room, done=self._load))

    def _load(self, arrival: Arrival) -> None:
        held = self._updater.chunks[arrival.number]
        if arrival.name == STATE:
            held.load_state(arrival.entries, arrival.memory)
        else:
            held.load(arrival.memory, anew=arrival.name == FIRST_WEIGHTS)

    def _on_fetch(self, message: Message[Fetch]) -> None:
        rank = asking_rank(message, self._plan.cluster)
        for chunk in self._chunks:
            self._send(rank, chunk)

    def _on_snapshot_due(self, message: Message[SnapshotDue]) -> None:
        """Send every chunk's state to a worker, as of the same decision at all servers."""
        rank = message.body.rank
        require_coordinator(message)
        if rank >= self._plan.cluster.ranks:
            raise FrameRefused(f"there is no rank {rank}")
        for chunk in self._chunks:
            self._send(rank, chunk, rounds=self._aggregator.round(self._plan.unit_of(chunk)))

    def _send(self, rank: Rank, chunk: Chunk, rounds: int = 0) -> None:
        entries, frames = self._updater.chunks[chunk.index].state()
        peer, number = f"rank {rank}", chunk.index
        self._transfer.send(peer, STATE, number, frames, entries=entries, round_=rounds)
