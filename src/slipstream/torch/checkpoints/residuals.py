"""Codecs' residuals in checkpoints: every worker's towards the holders, and every holder's.

Holders are servers, or workers that hold shares; a checkpoint calls theirs "servers" either way, so
that it can be loaded by the other kind.

A worker's residual counts with its share of the mean, 1/n. If the number of workers changes, it
is distributed again so that the weighted sum over workers does not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slipstream.codecs import SharedCodec
from slipstream.errors import FrameRefused
from slipstream.plan import Plan
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.members.member import HUB
from slipstream.torch.checkpoints.training_state import HOLDERS, Tensors
from slipstream.transports.wire import Fetch, Message, State, checksum
from slipstream.types import Chunk

RESIDUAL, PUBLISHED = "residual", "published"  # entries of a state: a worker's own, or as a holder


class Residuals:
    """One worker's part in gathering and restoring residuals; rank 0 collects them."""

    def __init__(
        self, plan: Plan, exchange: RoundChannel, member: Endpoint, limit_s: float
    ) -> None:
        self._plan, self._exchange, self._member, self._limit_s = plan, exchange, member, limit_s
        self._answers: dict[tuple[str, int, str], Message[Any]] = {}  # by sender, chunk and entry
        self._owed = [c for c in plan.chunks if any(m is not None for m in exchange.memories(c))]
        self._published = [
            chunk
            for chunk in plan.chunks
            if not isinstance(down := plan.routes[chunk.route].down, SharedCodec)
            and down.init(1, chunk.dtype) is not None
        ]
        self._held = [c for c in self._published if self._holder(c) == member.name]
        member.on(State, self._on_state)

    @property
    def kept(self) -> bool:
        """Whether any codec of this plan keeps a residual."""
        return bool(self._owed or self._published)

    # ---- saving

    def gather(self) -> dict[int | str, Tensors]:
        """Every rank calls it; rank 0 gets all residuals, by worker or ``HOLDERS``."""
        if not self._member.is_hub:
            for chunk in self._owed:
                self._send(HUB, chunk, RESIDUAL, self._exchange.memories(chunk))
            for chunk in self._held:
                self._send(HUB, chunk, PUBLISHED, self._exchange.held_memories(chunk))
            return {}
        for chunk in self._published:
            if self._plan.cluster.worker(self._holder(chunk)) < 0:
                self._member.send(self._holder(chunk), Fetch(chunk.index))
        self._member.wait_until(
            lambda: not self._awaited(),
            what="everybody's residuals",
            limit_s=self._limit_s,
            missing=lambda: sorted({name for name, *_ in self._awaited()}),
        )
        found: dict[int | str, Tensors] = {}
        for chunk in self._owed:
            self._collect(found, 0, chunk, self._exchange.memories(chunk))
        for chunk in self._held:
            self._collect(found, HOLDERS, chunk, self._exchange.held_memories(chunk))
        for (name, index, entry), message in self._answers.items():
            worker = self._plan.cluster.worker(name)
            whose = worker if worker >= 0 and entry == RESIDUAL else HOLDERS
            parts = [torch.frombuffer(bytearray(f), dtype=torch.float32) for f in message.frames]
            self._collect(found, whose, self._plan.chunks[index], parts)
        self._answers.clear()
        return found

    def _awaited(self) -> set[tuple[str, int, str]]:
        """Whose answers of which chunks have not come; what a lost worker owed is lost with it."""
        wanted = {
            (holder, c.index, RESIDUAL if self._plan.cluster.worker(holder) < 0 else PUBLISHED)
            for c in self._published
            if (holder := self._holder(c)) != self._member.name
        }
        for name in map(self._plan.cluster.name, range(1, self._plan.cluster.workers)):
            if name not in self._member.lost:
                wanted |= {(name, chunk.index, RESIDUAL) for chunk in self._owed}
        return wanted - self._answers.keys()

    def _collect(
        self, found: dict[int | str, Tensors], whose: int | str, chunk: Chunk, parts: object
    ) -> None:
        tensors = found.setdefault(whose, {})
        for segment, part in zip(chunk.segments, parts, strict=True):  # type: ignore[call-overload]
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
                    self._send(self._holder(chunk), chunk, RESIDUAL, parts)

    def _of_holder(self, chunk: Chunk, saved: Tensors) -> list[Any]:
        """By segment: what the chunk's holder had not sent of its results."""
        parts = []
        for segment in chunk.segments:
            spec = self._plan.specs[segment.tensor]
            owed = saved.get(spec.name, torch.zeros(spec.numel)).reshape(-1)
            parts.append(owed[segment.start : segment.stop].numpy())
        return parts

    def _send(self, peer: str, chunk: Chunk, entry: str, memories: Sequence[Any]) -> None:
        entries = [(s, entry, "float32") for s in range(len(memories))]
        frames = [memory.tobytes() for memory in memories]
        self._member.send(peer, State(chunk.index, entries, checksum(frames)), frames)

    def _holder(self, chunk: Chunk) -> str:
        return self._plan.cluster.name(self._plan.holders_of(chunk)[0])

    def _on_state(self, message: Message[State]) -> None:
        body = message.body
        if body.chunk >= len(self._plan.chunks):
            raise FrameRefused(f"there is no chunk {body.chunk}")
        chunk = self._plan.chunks[body.chunk]
        sizes = [4 * segment.numel for segment in chunk.segments]
        entry = body.entries[0][1] if body.entries else ""
        is_holder = message.sender == self._holder(chunk)
        known = is_holder or (self._plan.cluster.worker(message.sender) >= 0 and entry == RESIDUAL)
        if not known or [memoryview(frame).nbytes for frame in message.frames] != sizes:
            raise FrameRefused(f"residuals of chunk {body.chunk} from {message.sender}")
        if checksum(message.frames) != body.crc:
            raise FrameRefused(f"checksum of chunk {body.chunk}'s residuals does not match")
        with self._member.updating():
            self._answers[message.sender, body.chunk, entry] = message
