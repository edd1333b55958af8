"""A worker's access to servers' state: weights to send, optimizer state to fetch and restore."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from slipstream.errors import FrameRefused, RuntimeFault
from slipstream.plan import Plan
from slipstream.runtime.files.state_entries import AVERAGE, WEIGHTS, is_scalar
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.servers.senders import COORDINATOR
from slipstream.runtime.servers.shard_service import ShardService
from slipstream.torch.checkpoints.training_state import SharedState, optimizer_state
from slipstream.torch.optimizers.shard_optimizer import bytes_of, tensor_of
from slipstream.torch.tensors.fingerprint import digest_of
from slipstream.torch.tensors.inventory import Inventory, dtype_text
from slipstream.torch.tensors.staging import as_real
from slipstream.transports.wire import Fetch, Load, Message, Snapshot, State, checksum
from slipstream.types import Chunk


class ServerState:
    """Works chunk by chunk, which callers need not know; implements ``KeptState``.

    Args:
        optimizer: The optimizer that the loop uses; of it, checkpoints have type and settings.
        service: Sends requests to servers.
        meet: Waits until all ranks have called it, and returns the values of all.
    """

    def __init__(
        self,
        plan: Plan,
        inventory: Inventory,
        optimizer: torch.optim.Optimizer,
        member: Endpoint,
        service: ShardService,
        limit_s: float,
        meet: Callable[[Any], Sequence[Any]],
    ) -> None:
        self._plan, self._optimizer, self._service = plan, optimizer, service
        self._tensors, self._parameters = inventory.tensors, inventory.parameters
        self._member = member
        self._limit_s = limit_s
        self._answers: dict[int, Message[State]] = {}
        self.meet = meet
        member.on(State, self._on_state)

    def _server(self, chunk: Chunk) -> str:
        return self._plan.cluster.name(self._plan.holders_of(chunk)[0])

    def begin(self) -> None:
        """Send rank 0's weights to the servers; no server updates before it has them."""
        if self._member.is_hub:
            self._send_weights()
            self._service.accounts()  # answered after the weights have arrived

    def _send_weights(self, of: Container[int] | None = None, *, anew: bool = True) -> None:
        """Send this worker's weights to the servers.

        Args:
            of: The tensors whose chunks are sent; None: everything.
            anew: Whether averages begin with these weights, or go on.
        """
        flat = {i: as_real(tensor).cpu().reshape(-1) for i, tensor in enumerate(self._tensors)}
        for chunk in self._plan.chunks:
            if of is not None and not any(s.tensor in of for s in chunk.segments):
                continue
            frames = [bytes_of(flat[s.tensor][s.start : s.stop]) for s in chunk.segments]
            body = Load(chunk.index, checksum(frames), anew=anew)
            self._member.send(self._server(chunk), body, frames, priority=-1)

    def take_weights(self, tensors: Container[int]) -> None:
        """Rank 0's weights of these tensors, which the loop has changed, are the servers' now."""
        if self._member.is_hub:
            self._send_weights(tensors, anew=False)
            self._service.accounts()  # answered after all of it has arrived

    def take_loaded_weights(self, tensors: Container[int]) -> None:
        """Weights that all ranks have loaded before the first step are the servers' now.

        Raises:
            RuntimeFault: Ranks have different ones.
        """
        own = digest_of([self._tensors[i] for i in self._parameters])
        if len(set(self.meet(own))) > 1:
            raise RuntimeFault(
                "weights were changed after job.distribute, and not alike on all ranks: load the "
                "same ones everywhere, or change them before job.distribute, which gives rank 0's "
                "to all"
            )
        if self._member.is_hub:
            self._send_weights(tensors)
            self._service.accounts()
        self.meet(None)

    def take_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Rank 0's optimizer state is the servers' now."""
        if self._member.is_hub:
            self._send_state(as_tensors(state))
            self._service.accounts()

    def fetch(self) -> SharedState:
        """The servers' whole state of every tensor, put together."""
        self._answers.clear()
        if self._plan.consistency.agreed:
            self._member.send(COORDINATOR, Snapshot())
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
        rounds = max((message.body.round for message in self._answers.values()), default=0)
        weights: dict[str, torch.Tensor] = {}
        averages: dict[str, torch.Tensor] = {}
        state: dict[str, dict[str, Any]] = {}
        pieces: dict[tuple[int, str], list[tuple[int, torch.Tensor]]] = {}
        for index, message in self._answers.items():
            for (s, name, dtype), frame in zip(message.body.entries, message.frames, strict=True):
                segment = self._plan.chunks[index].segments[s]
                value = tensor_of(frame, getattr(torch, dtype)).clone()
                pieces.setdefault((segment.tensor, name), []).append((segment.start, value))
        for (tensor, name), parts in pieces.items():
            if not self._is_whole(tensor, name, parts):
                continue  # the first update has reached some servers only
            value = self._join(tensor, name, parts)
            spec = self._plan.specs[tensor]
            apart = {WEIGHTS: weights, AVERAGE: averages}
            if name in apart:
                apart[name][spec.name] = value
            else:
                state.setdefault(spec.name, {})[name] = value
        return SharedState(
            optimizer_state(self._optimizer, state),
            model=weights,
            averages=averages,
            step=self._plan.steps_a_round * rounds,
        )

    def _is_whole(self, tensor: int, name: str, parts: Sequence[tuple[int, torch.Tensor]]) -> bool:
        """Whether all servers of a tensor have sent this entry; each has it after an update."""
        held = sum(part.numel() for _, part in parts)
        return is_scalar(name) or held == math.prod(self._plan.specs[tensor].shape)

    def _join(self, tensor: int, name: str, parts: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        if is_scalar(name):
            return parts[0][1].reshape(())
        joined = torch.cat([part for _, part in sorted(parts, key=lambda pair: pair[0])])
        joined = joined.reshape(self._plan.specs[tensor].shape)
        return torch.view_as_complex(joined) if self._tensors[tensor].is_complex() else joined

    def restore(self, saved: SharedState) -> None:
        """Rank 0 hands everything back to whichever servers hold it now."""
        if not self._member.is_hub:
            return
        state = as_tensors(saved.optimizer.state)
        for name, average in saved.averages.items():
            state.setdefault(name, {})[AVERAGE] = average
        self._send_weights()
        self._send_state(state)
        self._service.accounts()  # answered after all of it has arrived

    def _send_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """``state``: by name of the tensor and of the entry."""
        for chunk in self._plan.chunks:
            entries, frames = [], []
            for s, segment in enumerate(chunk.segments):
                name = self._plan.specs[segment.tensor].name
                for entry, value in state.get(name, {}).items():
                    part = value
                    if not is_scalar(entry):
                        part = as_real(value).reshape(-1)[segment.start : segment.stop]
                    entries.append((s, entry, dtype_text(part.dtype)))
                    frames.append(bytes_of(part.cpu()))
            body = State(chunk.index, entries, checksum(frames))
            self._member.send(self._server(chunk), body, frames, priority=-1)

    def _on_state(self, message: Message[State]) -> None:
        index = message.body.chunk
        if index >= len(self._plan.chunks) or message.sender != self._server(
            self._plan.chunks[index]
        ):
            raise FrameRefused(f"state of chunk {index} from {message.sender}")
        if len(message.frames) != len(message.body.entries):
            raise FrameRefused(f"state of chunk {index} is incomplete")
        if checksum(message.frames) != message.body.crc:
            raise FrameRefused(f"checksum of the state of chunk {index} does not match")
        with self._member.updating():
            self._answers[index] = message


def as_tensors(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """An optimizer's state without what is not set."""
    return {
        name: {k: torch.as_tensor(v) for k, v in entries.items() if v is not None}
        for name, entries in state.items()
    }
