"""The weights that all workers have in common between outer rounds, and the state of both
optimizers in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from slipstream.runtime.files.checkpoint_format import OptimizerState
from slipstream.torch.checkpoints.kept_state import Held, OwnState, Tensors
from slipstream.torch.checkpoints.server_state import ServerState
from slipstream.torch.tensors.inventory import Inventory
from slipstream.updates import Nesterov

MOMENTUM = "momentum_buffer"  # as torch's SGD calls it
NOTHING: Mapping[str, Tensor] = MappingProxyType({})
PRECISE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # of outer weights


class OuterWeights:
    """The weights θ that all workers have in common, and the outer optimizer that updates them.

    Every worker has the same θ, to the last bit: all apply the same mean to the same weights. θ and
    the momentum of a parameter in 16 bits are float32, where small outer updates add up.

    Args:
        constant: Whether only updates change a parameter.

    Attributes:
        weights: θ, by the tensor's number.
        momenta: v, by the tensor's number; none before the first update, and none at workers where
            the servers apply.
    """

    def __init__(
        self,
        inventory: Inventory,
        outer: Nesterov,
        constant: Callable[[Tensor], bool] = lambda _: True,
    ) -> None:
        self.optimizer, self._constant = outer, constant
        self._trained = {i: inventory.tensors[i] for i in inventory.parameters}
        self._names = {i: inventory.specs[i].name for i in inventory.parameters}
        self.weights: dict[int, Tensor] = {}
        self.momenta: dict[int, Tensor] = {}
        self.begin({})

    def begin(self, momenta: Mapping[str, Tensor], precise: Mapping[str, Tensor] = NOTHING) -> None:
        """Go on from the model's weights.

        Args:
            momenta: v by the parameter's name, as a checkpoint has it.
            precise: θ by the parameter's name, where the model's own has fewer bits.
        """
        for i, parameter in self._trained.items():
            value = precise.get(self._names[i], parameter).detach()
            dtype = PRECISE.get(parameter.dtype, parameter.dtype)
            self.weights[i] = value.to(parameter.device, dtype, copy=True)
        # A checkpoint may hold more: of layers that are frozen in this job.
        trained = {name: i for i, name in self._names.items() if name in momenta}
        self.momenta = {i: momenta[name].to(self.weights[i]) for name, i in trained.items()}

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

    def momenta_by_name(self) -> dict[str, Tensor]:
        """v by the parameter's name."""
        return {self._names[i]: v for i, v in self.momenta.items()}

    def update(self, tensor: int, gradient: Tensor) -> None:
        """Apply the mean outer gradient of a tensor."""
        theta, momentum = self.weights[tensor], self.optimizer.momentum
        gradient = gradient.to(theta.dtype)
        if momentum:
            v = self.momenta.setdefault(tensor, torch.zeros_like(theta))
            v.mul_(momentum).add_(gradient)
            gradient = gradient.add(v, alpha=momentum)
        theta.sub_(gradient, alpha=self.optimizer.lr)


class OuterState:
    """The inner optimizer's state and the outer one's; implements ``KeptState``.

    Args:
        own: The user's optimizer, which runs in this process.
        buffers: Returns the buffers that all workers had in common after their last round.
        servers: Where servers apply: what they hold.
    """

    def __init__(
        self,
        own: OwnState,
        outer: OuterWeights,
        buffers: Callable[[], Tensors],
        servers: ServerState | None,
    ) -> None:
        self.own = own
        self._outer, self._buffers, self.servers = outer, buffers, servers

    def fetch(self) -> Held:
        held = self.own.fetch()
        if self.servers is None:
            held.weights = self._outer.copies() | self._buffers()
            held.momenta, held.precise = self._outer.momenta_by_name(), self._outer.precise()
            return held
        at_servers = self.servers.fetch()
        held.weights, held.round = at_servers.weights, at_servers.round
        momenta = {name: kept.get(MOMENTUM) for name, kept in at_servers.state.items()}
        held.momenta = {name: v for name, v in momenta.items() if v is not None}
        return held

    def restore(self, saved: OptimizerState, held: Held) -> None:
        self.own.restore(saved, held)
        if self.servers is None:
            self._outer.begin(held.momenta, held.precise)
            return
        self._outer.begin({})
        shown = self._outer.copies()
        momenta = {name: v.to(shown[name]) for name, v in held.momenta.items() if name in shown}
        state = {name: {MOMENTUM: v} for name, v in momenta.items()}
        self.servers.restore(OptimizerState("SGD", state, []), Held())


def as_torch(outer: Nesterov, parameters: Sequence[Tensor]) -> torch.optim.SGD:
    """The outer optimizer for servers, which run torch's own on their shards."""
    return torch.optim.SGD(
        parameters, lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0
    )


@dataclass(frozen=True, slots=True)
class Standing:
    """What a worker has of its own between outer rounds, besides weights and optimizer state.

    Attributes:
        inner: The ``LocalSteps`` by which it trains.
        alike: Whether all workers have the outer weights.
        under_way: Fragments, in the order in which they were sent.
        results: By tensor's name, of these fragments.
        counted: The tensors of which this worker's outer gradient counted.
        kept: By tensor's name: see ``Arrived``.
        residuals: By tensor's name, where servers apply; else the checkpoint itself has them.
    """

    inner: str
    alike: bool
    under_way: list[int]
    results: dict[str, Tensor]
    counted: list[str]
    kept: dict[str, Tensor]
    residuals: dict[str, Tensor]
