"""A worker's access to what servers hold: weights to send, optimizer state to fetch and restore."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slipstream.errors import FrameRefused
from slipstream.runtime.member import Member
from slipstream.runtime.server import DECIDING
from slipstream.strategy import Plan
from slipstream.torch.inventory import Inventory
from slipstream.torch.shard_optimizer import WEIGHTS, bytes_of, is_scalar, tensor_of
from slipstream.torch.staging import as_real
from slipstream.transports.wire import Fetch, Load, Message, Snapshot, State, checksum
from slipstream.types import Chunk

StateByTensor = dict[int, dict[str, torch.Tensor]]


class ServerState:
    """Used by rank 0 for all; chunks and segments are its own affair."""

    def __init__(self, plan: Plan, inventory: Inventory, member: Member, limit_s: float) -> None:
        self._plan = plan
        self._tensors = inventory.tensors
        self._member = member
        self._limit_s = limit_s
        self._answers: dict[int, Message] = {}
        self.round = 0  # of what was fetched last
        member.on(State, self._on_state)

    def _server(self, chunk: Chunk) -> str:
        return self._plan.cluster.name(self._plan.holders[chunk.index][0])

    def send_weights(self) -> None:
        """The weights as they are here become the servers'."""
        flat = {i: as_real(tensor).cpu().reshape(-1) for i, tensor in enumerate(self._tensors)}
        for chunk in self._plan.chunks:
            frames = [bytes_of(flat[s.tensor][s.start : s.stop]) for s in chunk.segments]
            body = Load(chunk.index, checksum(frames))
            self._member.send(self._server(chunk), body, frames, priority=-1)

    def fetch(self) -> StateByTensor:
        """Everything that servers know of every tensor, put together.

        Where servers agree on rounds, all of it is of the same one.
        """
        self._answers.clear()
        if self._plan.consistency.agreed:
            self._member.send(DECIDING, Snapshot())
        else:
            for chunk in self._plan.chunks:
                self._member.send(self._server(chunk), Fetch(chunk.index))
        everything = len(self._plan.chunks)
        self._member.wait_until(
            lambda: len(self._answers) == everything,
            what="the servers' optimizer state",
            limit_s=self._limit_s,
            missing=lambda: sorted(
                {self._server(c) for c in self._plan.chunks if c.index not in self._answers}
            ),
        )
        self.round = max((state_of(m).round for m in self._answers.values()), default=0)
        pieces: dict[int, dict[str, list[tuple[int, torch.Tensor]]]] = {}
        for index, message in self._answers.items():
            for (s, name, dtype), frame in zip(
                state_of(message).entries, message.frames, strict=True
            ):
                segment = self._plan.chunks[index].segments[s]
                value = tensor_of(frame, getattr(torch, dtype)).clone()
                pieces.setdefault(segment.tensor, {}).setdefault(name, []).append(
                    (segment.start, value)
                )
        return {
            tensor: {name: self._join(tensor, name, parts) for name, parts in names.items()}
            for tensor, names in pieces.items()
        }

    def _join(self, tensor: int, name: str, parts: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        if is_scalar(name):
            return parts[0][1].reshape(())
        joined = torch.cat([part for _, part in sorted(parts, key=lambda pair: pair[0])])
        joined = joined.reshape(self._plan.specs[tensor].shape)
        return torch.view_as_complex(joined) if self._tensors[tensor].is_complex() else joined

    def restore(self, state: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Hand optimizer state back to whichever servers now hold it."""
        for chunk in self._plan.chunks:
            entries, frames = [], []
            for s, segment in enumerate(chunk.segments):
                for name, value in state.get(segment.tensor, {}).items():
                    part = value
                    if name == WEIGHTS:
                        continue  # they have been sent
                    if not is_scalar(name):
                        part = as_real(value).reshape(-1)[segment.start : segment.stop]
                    entries.append((s, name, str(part.dtype).removeprefix("torch.")))
                    frames.append(bytes_of(part))
            body = State(chunk.index, entries, checksum(frames))
            self._member.send(self._server(chunk), body, frames, priority=-1)

    def _on_state(self, message: Message) -> None:
        assert isinstance(message.body, State)
        index = message.body.chunk
        if index >= len(self._plan.chunks) or message.sender != self._server(
            self._plan.chunks[index]
        ):
            raise FrameRefused(f"state of chunk {index} from {message.sender}")
        if len(message.frames) != len(message.body.entries):
            raise FrameRefused(f"state of chunk {index} is incomplete")
        if checksum(message.frames) != message.body.crc:
            raise FrameRefused(f"checksum of the state of chunk {index} does not match")
        with self._member.changed:
            self._answers[index] = message
            self._member.changed.notify_all()


def state_of(message: Message) -> State:
    assert isinstance(message.body, State)
    return message.body
