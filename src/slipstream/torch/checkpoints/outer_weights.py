"""The weights that all workers have in common between outer rounds, and the state of both
optimizers in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from slipstream.outer_optimizers import OuterOptimizer, State
from slipstream.torch.checkpoints.kept_state import StateAtWorker
from slipstream.torch.checkpoints.server_state import ServerState
from slipstream.torch.checkpoints.training_state import SharedState, Tensors
from slipstream.torch.tensors.inventory import Inventory
from slipstream.torch.tensors.staging import as_real

NOTHING: Mapping[str, Tensor] = MappingProxyType({})
PRECISE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # of outer weights


class OuterWeights:
    """The weights θ that all workers have in common, and the outer optimizer that updates them.

    Every worker has the same θ, to the last bit: all apply the same mean to the same weights. θ and
    the outer optimizer's state of a parameter in 16 bits are float32, where small outer updates add
    up; those of complex numbers are pairs of real ones.

    Args:
        constant: Whether only updates change a parameter.

    Attributes:
        weights: θ, by the tensor's number.
        states: The outer optimizer's, by the tensor's number; none before the first update, and
            none at workers where the servers apply.
    """

    def __init__(
        self,
        inventory: Inventory,
        outer: OuterOptimizer,
        constant: Callable[[Tensor], bool] = lambda _: True,
    ) -> None:
        self.optimizer, self._constant = outer, constant
        self._trained = {i: inventory.tensors[i] for i in inventory.parameters}
        self._names = {i: inventory.specs[i].name for i in inventory.parameters}
        self.weights: dict[int, Tensor] = {}
        self.states: dict[int, State] = {}
        self.begin({})

    def begin(
        self, states: Mapping[str, Mapping[str, Any]], precise: Mapping[str, Tensor] = NOTHING
    ) -> None:
        """Go on from the model's weights.

        Args:
            states: The outer optimizer's by the parameter's name, as a checkpoint has them; those
                of another outer optimizer begin anew.
            precise: θ by the parameter's name, where the model's own has fewer bits.
        """
        for i, parameter in self._trained.items():
            value = precise.get(self._names[i], parameter).detach()
            dtype = PRECISE.get(parameter.dtype, parameter.dtype)
            self.weights[i] = value.to(parameter.device, dtype, copy=True)
        self.states = {}
        for i, name in self._names.items():
            if name in states and (like := self.like(name, states[name])) is not None:
                self.states[i] = {
                    entry: placed_like(states[name][entry], own) for entry, own in like.items()
                }

    def like(self, name: str, state: Mapping[str, Any]) -> State | None:
        """The state that the outer optimizer begins with, if it keeps such entries as these.

        None if it keeps others, or no state of this parameter: of layers that are frozen in this
        job a checkpoint may hold some.
        """
        tensor = next((i for i, known in self._names.items() if known == name), None)
        if tensor is None:
            return None
        begun = self.optimizer.init(as_array(self.weights[tensor]))
        return begun if begun.keys() == state.keys() else None

    @property
    def constant(self) -> list[Tensor]:
        """The model's own parameters that only updates change, or the loop."""
        return list(filter(self._constant, self._trained.values()))

    def loaded(self) -> list[int]:
        """The tensors of which the loop has given the model other weights than θ."""
        return [i for i in self._moved() if self._constant(self._trained[i])]

    def renormed(self) -> bool:
        """Whether forward passes have changed a parameter."""
        return any(not self._constant(self._trained[i]) for i in self._moved())

    def _moved(self) -> Iterator[int]:
        return (i for i, p in self._trained.items() if not torch.equal(self.seen(i), p))

    def follow(self, loaded: Sequence[int]) -> None:
        """Go on from the model's weights of these tensors, the same on all ranks."""
        for i in loaded:
            self.weights[i].copy_(self._trained[i].detach())

    def seen(self, tensor: int) -> Tensor:
        """θ in the model's own format: what a worker begins its local steps with."""
        return self.weights[tensor].to(self._trained[tensor].dtype)

    def copies(self) -> dict[str, Tensor]:
        """θ by the parameter's name, in the model's format and in memory that no update changes."""
        return {self._names[i]: self.seen(i).clone() for i in self.weights}

    def precise(self) -> dict[str, Tensor]:
        """θ by the parameter's name, of parameters whose own format has fewer bits."""
        short = [i for i, parameter in self._trained.items() if parameter.dtype in PRECISE]
        return {self._names[i]: self.weights[i] for i in short}

    def states_by_name(self) -> dict[str, dict[str, Tensor]]:
        """The outer optimizer's states by the parameter's name, for a checkpoint."""
        return {
            self._names[i]: {entry: self._kept(i, value) for entry, value in state.items()}
            for i, state in self.states.items()
        }

    def _kept(self, tensor: int, value: Any) -> Tensor:
        if isinstance(value, float):
            return torch.tensor(value, dtype=torch.float64)
        kept, theta = torch.as_tensor(value), self.weights[tensor]
        return torch.view_as_complex(kept) if theta.is_complex() else kept.view_as(theta)

    def update(self, tensor: int, gradient: Tensor) -> None:
        """Apply the mean outer gradient of a tensor."""
        theta = as_array(self.weights[tensor])
        if tensor not in self.states:
            self.states[tensor] = self.optimizer.init(theta)
        given = as_array(gradient.to(self.weights[tensor].dtype))
        with np.errstate(all="ignore"):  # as torch has it; losses show what is not finite
            self.optimizer.update(theta, given, self.states[tensor])


class OuterState:
    """The inner optimizer's state and the outer one's; implements ``KeptState``.

    Args:
        own: The user's optimizer, which runs in this process.
        buffers: Returns the buffers that all workers had in common after their last round.
        servers: Where servers apply: what they hold.
    """

    def __init__(
        self,
        own: StateAtWorker,
        outer: OuterWeights,
        buffers: Callable[[], Tensors],
        servers: ServerState | None,
    ) -> None:
        self.own = own
        self._outer, self._buffers, self.servers = outer, buffers, servers

    def fetch(self) -> SharedState:
        found = self.own.fetch()
        if self.servers is None:
            found.model = self._outer.copies() | self._buffers()
            found.outer, found.precise = self._outer.states_by_name(), self._outer.precise()
            return found
        at_servers = self.servers.fetch()
        found.model, found.step = at_servers.model, at_servers.step
        found.outer = at_servers.optimizer.state
        return found

    def restore(self, saved: SharedState) -> None:
        self.own.restore(saved)
        if self.servers is None:
            self._outer.begin(saved.outer, saved.precise)
            return
        self._outer.begin({})
        kept = {
            name: entries
            for name, entries in saved.outer.items()
            if self._outer.like(name, entries) is not None
        }
        outer = msgspec.structs.replace(saved.optimizer, state=kept)
        self.servers.restore(SharedState(outer))


def as_array(tensor: Tensor) -> Any:
    """The memory with which the outer optimizer computes: the tensor's memory, as real numbers.

    On a CPU that is a numpy array: numpy rounds alike on every processor, as servers do, and
    torch's square roots do not. So workers on different processors keep equal weights. An array
    has a dimension: without one, numpy makes numbers of results, which cannot change in place.
    """
    real = as_real(tensor)
    real = real if real.ndim else real.view(1)
    return real.numpy() if real.device.type == "cpu" else real


def placed_like(value: Tensor, own: Any) -> Any:
    """An entry of a checkpoint in the format of the state that is begun with."""
    if isinstance(own, float):
        return float(value)
    return as_array(as_real(value).to(torch.as_tensor(own), copy=True))
