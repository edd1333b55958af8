"""Codecs' residuals in checkpoints: every worker's towards the holders, and every holder's.

Holders are servers, or workers that hold shares; a checkpoint calls theirs "servers" either way, so
that it can be loaded by the other kind.

A worker's residual counts with its share of the mean, 1/n. If the number of workers changes, it
is distributed again so that the weighted sum over workers does not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from slipstream.codecs import SharedCodec
from slipstream.errors import FrameRefused
from slipstream.plan import Plan
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.exchange.transfer import Arrival, Transfer
from slipstream.runtime.files.state_entries import PUBLISHED, RESIDUAL, room_in
from slipstream.runtime.members.member import HUB
from slipstream.torch.checkpoints.training_state import HOLDERS, Tensors
from slipstream.transports.wire import Fetch, Message
from slipstream.types import Chunk


class Residuals:
    """One worker's part in gathering and restoring residuals; rank 0 collects them.

    Args:
        plan: Says which codecs keep residuals, and who holds a chunk.
        exchange: Has this worker's residuals.
        transfer: Sends and receives residuals.
        limit_s: How long rank 0 waits for those of the others.
    """

    def __init__(
        self, plan: Plan, exchange: RoundChannel, transfer: Transfer, limit_s: float
    ) -> None:
        self._plan, self._exchange, self._limit_s = plan, exchange, limit_s
        self._transfer, self._member = transfer, transfer.member
        self._owed = [c for c in plan.chunks if any(m is not None for m in exchange.memories(c))]
        self._published = [
            chunk
            for chunk in plan.chunks
            if not isinstance(down := plan.routes[chunk.route].down, SharedCodec)
            and down.init(1, chunk.dtype) is not None
        ]
        self._held = [c for c in self._published if self._holder(c) == self._member.name]
        transfer.serve(RESIDUAL, self._on_fetch)

    def close(self) -> None:
        """Answer no requests any more."""
        self._transfer.stop_serving(RESIDUAL)

    @property
    def kept(self) -> bool:
        """Whether any codec of this plan keeps a residual."""
        return bool(self._owed or self._published)

    # ---- saving

    def gather(self) -> dict[int | str, Tensors]:
        """Every rank calls it; rank 0 gets all residuals, by worker or ``HOLDERS``.

        The others only answer rank 0, which asks after all ranks have begun to save. What a lost
        worker owed is lost with it.
        """
        found: dict[int | str, Tensors] = {}
        if not self._member.is_hub:
            return found
        for name, chunk in self._kept_by(HUB):
            self._collect(found, HUB, name, chunk, self._own(name, chunk))
        cluster = self._plan.cluster
        arrivals = [
            Arrival(sender, name, chunk.index, partial(room_in, chunk, "float32"))
            for sender in map(cluster.name, range(1, cluster.workers + cluster.servers))
            if sender not in self._member.lost
            for name, chunk in self._kept_by(sender)
        ]
        asked = dict.fromkeys((arrival.sender for arrival in arrivals), RESIDUAL)
        what, limit_s = "everybody's residuals", self._limit_s
        for arrival in self._transfer.receive(arrivals, asked, what=what, limit_s=limit_s):
            chunk = self._plan.chunks[arrival.number]
            parts = [memory.view(np.float32) for memory in arrival.memory]
            self._collect(found, arrival.sender, arrival.name, chunk, parts)
        return found

    def _kept_by(self, member: str) -> list[tuple[str, Chunk]]:
        """The residuals that a member keeps, towards holders and as a holder."""
        owed = self._owed if self._plan.cluster.worker(member) >= 0 else []
        held = [chunk for chunk in self._published if self._holder(chunk) == member]
        return [*((RESIDUAL, chunk) for chunk in owed), *((PUBLISHED, chunk) for chunk in held)]

    def _own(self, name: str, chunk: Chunk) -> Sequence[Any]:
        own = self._exchange
        return own.memories(chunk) if name == RESIDUAL else own.held_memories(chunk)

    def _on_fetch(self, message: Message[Fetch]) -> None:
        if message.sender != HUB:
            raise FrameRefused(f"{message.sender} asks for residuals, expected {HUB}")
        for name, chunk in self._kept_by(self._member.name):
            self._send(HUB, name, chunk, self._own(name, chunk))

    def _collect(
        self,
        found: dict[int | str, Tensors],
        member: str,
        name: str,
        chunk: Chunk,
        parts: Sequence[Any],
    ) -> None:
        whose = self._plan.cluster.worker(member) if name == RESIDUAL else HOLDERS
        tensors = found.setdefault(whose, {})
        for segment, part in zip(chunk.segments, parts, strict=True):
            spec = self._plan.specs[segment.tensor]
            whole = tensors.setdefault(spec.name, torch.zeros(spec.numel))
            whole[segment.start : segment.stop] = torch.as_tensor(part)

    # ---- loading

    def restore(self, saved: Mapping[int | str, Tensors]) -> None:
        """Every rank has all residuals, and takes its share; rank 0 sends the servers theirs."""
        if any(saved.values()) and not self.kept and self._member.is_hub:
            warnings.warn(
                "the checkpoint holds residuals of a strategy that sends less than all of a "
                "gradient; this one keeps none, so they are left out",
                stacklevel=2,
            )
        # Without workers that were lost.
        workers = sorted(each for each in saved if isinstance(each, int) and saved[each])
        before, now = len(workers), self._plan.cluster.workers
        mine = workers[self._plan.cluster.worker(self._member.name) :: now]
        for chunk in self._owed:
            for segment, memory in zip(chunk.segments, self._exchange.memories(chunk), strict=True):
                name = self._plan.specs[segment.tensor].name
                memory[:] = 0
                for old in mine:
                    if (owed := saved[old].get(name)) is not None:
                        part = owed.reshape(-1)[segment.start : segment.stop]
                        memory += (part * (now / before)).numpy()
        for chunk in self._held:
            parts = self._of_holder(chunk, saved.get(HOLDERS, {}))
            for memory, part in zip(self._exchange.held_memories(chunk), parts, strict=True):
                memory[:] = part
        if self._member.is_hub:
            for chunk in self._published:
                if self._plan.cluster.worker(self._holder(chunk)) < 0:
                    parts = self._of_holder(chunk, saved.get(HOLDERS, {}))
                    self._send(self._holder(chunk), PUBLISHED, chunk, parts)

    def _of_holder(self, chunk: Chunk, saved: Tensors) -> list[Any]:
        """By segment: what the chunk's holder had not sent of its results."""
        parts = []
        for segment in chunk.segments:
            spec = self._plan.specs[segment.tensor]
            owed = saved.get(spec.name, torch.zeros(spec.numel)).reshape(-1)
            parts.append(owed[segment.start : segment.stop].numpy())
        return parts

    def _send(self, peer: str, name: str, chunk: Chunk, parts: Sequence[Any]) -> None:
        self._transfer.send(peer, name, chunk.index, [part.tobytes() for part in parts])

    def _holder(self, chunk: Chunk) -> str:
        return self._plan.cluster.name(self._plan.holders_of(chunk)[0])
