"""A worker's access to servers' state: weights to send, optimizer state to fetch and restore."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.runtime.exchange.transfer import Arrival, Transfer
from slipstream.runtime.files.state_entries import (
    AVERAGE,
    FIRST_WEIGHTS,
    SNAPSHOT,
    STATE,
    WEIGHTS,
    is_scalar,
    room_for,
)
from slipstream.runtime.servers.senders import COORDINATOR
from slipstream.runtime.servers.shard_service import ShardService
from slipstream.torch.checkpoints.training_state import SharedState, optimizer_state
from slipstream.torch.optimizers.shard_optimizer import bytes_of, tensor_of
from slipstream.torch.tensors.fingerprint import digest_of
from slipstream.torch.tensors.inventory import Inventory, dtype_text
from slipstream.torch.tensors.staging import as_real
from slipstream.types import Buffer, Chunk, Entry


class ServerState:
    """Works chunk by chunk, which callers need not know; implements ``KeptState``.

    Args:
        optimizer: The optimizer that the loop uses; of it, checkpoints have type and settings.
        transfer: Sends and receives the state.
        service: Sends requests to servers.
        meet: Waits until all ranks have called it, and returns the values of all.
    """

    def __init__(
        self,
        plan: Plan,
        inventory: Inventory,
        optimizer: torch.optim.Optimizer,
        transfer: Transfer,
        service: ShardService,
        limit_s: float,
        meet: Callable[[Any], Sequence[Any]],
    ) -> None:
        self._plan, self._optimizer, self._service = plan, optimizer, service
        self._tensors, self._parameters = inventory.tensors, inventory.parameters
        self._transfer, self._member = transfer, transfer.member
        self._limit_s = limit_s
        self.meet = meet

    def _server(self, chunk: Chunk) -> str:
        return self._plan.cluster.name(self._plan.holders_of(chunk)[0])

    def _send(
        self, name: str, chunk: Chunk, frames: Sequence[Buffer], entries: Sequence[Entry] = ()
    ) -> None:
        peer, number = self._server(chunk), chunk.index
        self._transfer.send(peer, name, number, frames, entries=entries, priority=-1)

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
            self._send(FIRST_WEIGHTS if anew else WEIGHTS, chunk, frames)

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
        arrivals = self._receive()
        rounds = max((each.first.round for each in arrivals if each.first is not None), default=0)
        weights: dict[str, torch.Tensor] = {}
        averages: dict[str, torch.Tensor] = {}
        state: dict[str, dict[str, Any]] = {}
        pieces: dict[tuple[int, str], list[tuple[int, torch.Tensor]]] = {}
        for arrival in arrivals:
            segments = self._plan.chunks[arrival.number].segments
            for (s, name, dtype), memory in zip(arrival.entries, arrival.memory, strict=True):
                value = tensor_of(memory, getattr(torch, dtype))
                parts = pieces.setdefault((segments[s].tensor, name), [])
                parts.append((segments[s].start, value))
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

    def _receive(self) -> Sequence[Arrival]:
        """Ask servers for the state of all chunks, and wait for it."""
        arrivals = [
            Arrival(self._server(chunk), STATE, chunk.index, partial(room_for, chunk))
            for chunk in self._plan.chunks
        ]
        asked = dict.fromkeys((arrival.sender for arrival in arrivals), STATE)
        if self._plan.consistency.agreed:
            asked = {COORDINATOR: SNAPSHOT}
        what, limit_s = "the servers' optimizer state", self._limit_s
        return self._transfer.receive(arrivals, asked, what=what, limit_s=limit_s)

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
            self._send(STATE, chunk, frames, entries)


def as_tensors(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """An optimizer's state without what is not set."""
    return {
        name: {k: torch.as_tensor(v) for k, v in entries.items() if v is not None}
        for name, entries in state.items()
    }
