"""Codecs' residuals in checkpoints: every worker's towards the servers, and every server's.

A worker's residual counts with its share of the mean, 1/n. Loaded into another number of workers it
is dealt out anew so that the sum over workers, with their share, stays what it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from slipstream.codecs import InPlace
from slipstream.errors import FrameRefused
from slipstream.plan import Plan
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.members.member import HUB
from slipstream.transports.wire import Fetch, Message, State, checksum
from slipstream.types import Chunk

RESIDUAL = "residual"  # as an entry of a state
HEAD = "residual/"


class Residuals:
    """One worker's part in gathering and restoring them; rank 0's is to keep them all."""

    def __init__(
        self, plan: Plan, exchange: RoundChannel, member: Endpoint, limit_s: float
    ) -> None:
        self._plan, self._exchange, self._member, self._limit_s = plan, exchange, member, limit_s
        self._answers: dict[tuple[str, int], Message[Any]] = {}
        self._owed = [c for c in plan.chunks if any(m is not None for m in exchange.memories(c))]
        self._published = [
            chunk
            for chunk in plan.chunks
            if not isinstance(down := plan.routes[chunk.route].down, InPlace)
            and down.init(1, chunk.dtype) is not None
        ]
        member.on(State, self._on_state)

    @property
    def kept(self) -> bool:
        """Whether any codec of this plan remembers anything."""
        return bool(self._owed or self._published)

    # ---- saving

    def gather(self) -> dict[str, torch.Tensor]:
        """Every rank calls it; rank 0 gets all of them, by a name that says whose and of what."""
        if not self._member.is_hub:
            for chunk in self._owed:
                memories = self._exchange.memories(chunk)
                entries = [(s, RESIDUAL, "float32") for s in range(len(memories))]
                frames = [memory.tobytes() for memory in memories]
                self._member.send(HUB, State(chunk.index, entries, checksum(frames)), frames)
            return {}
        for chunk in self._published:
            self._member.send(self._server(chunk), Fetch(chunk.index))
        self._member.wait_until(
            lambda: not self._awaited(),
            what="everybody's residuals",
            limit_s=self._limit_s,
            missing=lambda: sorted({name for name, _ in self._awaited()}),
        )
        found: dict[str, torch.Tensor] = {}
        for chunk in self._owed:
            self._collect(found, f"{HEAD}0/", chunk, self._exchange.memories(chunk))
        for (name, index), message in self._answers.items():
            worker = self._plan.cluster.worker(name)
            whose = f"{HEAD}{worker}/" if worker >= 0 else f"{HEAD}servers/"
            parts = [torch.frombuffer(bytearray(f), dtype=torch.float32) for f in message.frames]
            self._collect(found, whose, self._plan.chunks[index], parts)
        self._answers.clear()
        return found

    def _awaited(self) -> set[tuple[str, int]]:
        """Whose answers of which chunks have not come; what a lost worker owed is lost with it."""
        wanted = {(self._server(c), c.index) for c in self._published}
        for name in map(self._plan.cluster.name, range(1, self._plan.cluster.workers)):
            if name not in self._member.lost:
                wanted |= {(name, chunk.index) for chunk in self._owed}
        return wanted - self._answers.keys()

    def _collect(
        self, found: dict[str, torch.Tensor], whose: str, chunk: Chunk, parts: object
    ) -> None:
        for segment, part in zip(chunk.segments, parts, strict=True):  # type: ignore[call-overload]
            spec = self._plan.specs[segment.tensor]
            whole = found.setdefault(whose + spec.name, torch.zeros(spec.numel))
            whole[segment.start : segment.stop] = torch.as_tensor(part)

    # ---- loading

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Every rank has all of them, and takes its share; rank 0 tells the servers theirs."""
        named = {n.removeprefix(HEAD): t for n, t in tensors.items() if n.startswith(HEAD)}
        if named and not self.kept and self._member.is_hub:
            warnings.warn(
                "the checkpoint holds residuals of a strategy that sends less than all of a "
                "gradient; this one keeps none, so they are left out",
                stacklevel=2,
            )
        # By rank; one that was lost before is not among them.
        saved_ranks = sorted({n.partition("/")[0] for n in named} - {"servers"}, key=int)
        before, now = len(saved_ranks), self._plan.cluster.workers
        mine = saved_ranks[self._plan.cluster.worker(self._member.name) :: now]
        for chunk in self._owed:
            for segment, memory in zip(chunk.segments, self._exchange.memories(chunk), strict=True):
                name = self._plan.specs[segment.tensor].name
                memory[:] = 0
                for old in mine:
                    if (owed := named.get(f"{old}/{name}")) is not None:
                        part = owed.reshape(-1)[segment.start : segment.stop]
                        memory += (part * (now / before)).numpy()
        if self._member.is_hub:
            for chunk in self._published:
                self._tell_server(chunk, named)

    def _tell_server(self, chunk: Chunk, named: Mapping[str, torch.Tensor]) -> None:
        entries, frames = [], []
        for s, segment in enumerate(chunk.segments):
            spec = self._plan.specs[segment.tensor]
            owed = named.get(f"servers/{spec.name}", torch.zeros(spec.numel)).reshape(-1)
            entries.append((s, RESIDUAL, "float32"))
            frames.append(owed[segment.start : segment.stop].numpy().tobytes())
        self._member.send(
            self._server(chunk), State(chunk.index, entries, checksum(frames)), frames
        )

    def _server(self, chunk: Chunk) -> str:
        return self._plan.cluster.name(self._plan.holders_of(chunk)[0])

    def _on_state(self, message: Message[State]) -> None:
        body = message.body
        if body.chunk >= len(self._plan.chunks):
            raise FrameRefused(f"there is no chunk {body.chunk}")
        chunk = self._plan.chunks[body.chunk]
        sizes = [4 * segment.numel for segment in chunk.segments]
        known = self._plan.cluster.worker(message.sender) >= 0 or message.sender == self._server(
            chunk
        )
        if not known or [memoryview(frame).nbytes for frame in message.frames] != sizes:
            raise FrameRefused(f"residuals of chunk {body.chunk} from {message.sender}")
        if checksum(message.frames) != body.crc:
            raise FrameRefused(f"checksum of chunk {body.chunk}'s residuals does not match")
        with self._member.updating():
            self._answers[message.sender, body.chunk] = message
