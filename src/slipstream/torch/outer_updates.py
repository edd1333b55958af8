"""Where workers train on weights of their own, and outer rounds bring these together (DiLoCo)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.plan import Plan
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.files.checkpoint_format import OptimizerState
from slipstream.torch.inventory import Inventory
from slipstream.torch.kept_state import Held, Named, OwnState
from slipstream.torch.server_state import ServerState
from slipstream.torch.synchronizer import Synchronizer
from slipstream.updates import LocalSteps, Nesterov

MOMENTUM = "momentum_buffer"  # as torch's SGD calls it


class OuterWeights:
    """The weights θ that all workers have in common, and the outer optimizer that updates them.

    Every worker has the same θ, to the last bit: all apply the same mean to the same weights.

    Attributes:
        weights: θ, by the tensor's number.
        momenta: v, by the tensor's number; none before the first update, and none at workers where
            the servers apply.
    """

    def __init__(self, inventory: Inventory, outer: Nesterov) -> None:
        self.optimizer = outer
        self._trained = {i: inventory.tensors[i] for i in inventory.parameters}
        self._names = {i: inventory.specs[i].name for i in inventory.parameters}
        self.weights: dict[int, Tensor] = {}
        self.momenta: dict[int, Tensor] = {}
        self.begin({})

    def begin(self, momenta: Mapping[str, Tensor]) -> None:
        """Go on from the model's weights.

        Args:
            momenta: v by the parameter's name, as a checkpoint has it.
        """
        self.weights = {i: p.detach().clone() for i, p in self._trained.items()}
        numbers = {name: i for i, name in self._names.items()}
        self.momenta = {
            numbers[name]: v.to(self.weights[numbers[name]]) for name, v in momenta.items()
        }

    def by_name(self, tensors: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """The same by the parameter's name."""
        return {self._names[i]: tensor for i, tensor in tensors.items()}

    def update(self, tensor: int, gradient: Tensor) -> None:
        """Apply the mean outer gradient of a tensor."""
        theta, momentum = self.weights[tensor], self.optimizer.momentum
        if momentum:
            v = self.momenta.setdefault(tensor, torch.zeros_like(theta))
            v.mul_(momentum).add_(gradient)
            gradient = gradient.add(v, alpha=momentum)
        theta.sub_(gradient, alpha=self.optimizer.lr)


class OuterUpdates:
    """The user's optimizer steps on this worker's weights; implements ``Applier``.

    After the steps that ``LocalSteps`` names, a fragment's outer gradients are sent, or its results
    are merged.

    Args:
        optimizer: The user's own.
        outer: The weights that all workers have in common.
        links: The channel whose codecs may keep a part of an outer gradient back, if there is one.
    """

    single_pass = ""  # nothing leaves in a backward pass

    def __init__(
        self,
        synchronizer: Synchronizer,
        optimizer: torch.optim.Optimizer,
        outer: OuterWeights,
        links: RoundChannel | None,
    ) -> None:
        assert synchronizer.plan.local_steps is not None
        self._local: LocalSteps = synchronizer.plan.local_steps
        self._synchronizer, self._outer, self._links = synchronizer, outer, links
        self._servers_apply = synchronizer.plan.update.holder_applies
        self._kept_before: dict[int, Tensor | float] = {}  # when a fragment was sent
        self._under_way: list[int] = []  # fragments, in the order in which they were sent
        self.hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    # ---- steps of the loop

    def pass_ended(self) -> None:
        """Gradients are this worker's own affair."""

    def begin_step(self) -> None:
        """What is under way stays so."""

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        gradients = self._synchronizer.gradients
        gradients.refuse_unknown(optimizer)
        self._synchronizer.tap.end()
        gradients.clear_refused()
        gradients.clip()

    def _after_step(self, *_: Any) -> None:
        made = self._synchronizer.step + 1
        if (fragment := self._local.sent_after(made)) is not None:
            self._send([fragment])
        fragment = self._local.merged_after(made)
        if fragment is not None and fragment in self._under_way:
            self._merge(fragment)
        self._synchronizer.end_step()

    # ---- outer rounds

    def wait(self, tensors: Sequence[int] | None = None) -> None:
        """Merge what is under way."""
        while self._under_way:
            self._merge(self._under_way[0])

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give all workers the same weights; every rank calls it after the same step.

        They are the mean of the workers' weights: the outer optimizer is for whole rounds. Where
        servers apply, they are the servers', without what workers did since the last round.
        """
        self.wait()
        tensors, outer = self._synchronizer.inventory.tensors, self._outer
        if self._servers_apply:
            for tensor, theta in outer.weights.items():
                tensors[tensor].data.copy_(theta)
            return
        everything = range(len(self._synchronizer.plan.fragments))
        self._send(everything)
        for fragment in everything:
            for tensor, mean in self._results_of(fragment).items():
                tensors[tensor].data.copy_(outer.weights[tensor].sub_(mean))
        self._kept_before.clear()

    @torch.no_grad()
    def _send(self, fragments: Collection[int]) -> None:
        """Send the outer gradients of some fragments; the others take no part in this round."""
        synchronizer, plan = self._synchronizer, self._synchronizer.plan
        taking_part = {tensor for f in fragments for tensor in plan.fragments[f]}
        for tensor, theta in self._outer.weights.items():
            if tensor in taking_part:
                own = synchronizer.inventory.tensors[tensor]
                synchronizer.slots.contributions[tensor] = theta - own
                if self._local.mix:
                    self._kept_before[tensor] = self._kept_back(tensor)
        others = set(range(len(plan.specs))) - taking_part
        for channel in synchronizer.driver.channels:
            channel.skip_round(others)
        synchronizer.flush()
        self._under_way += fragments

    def _results_of(self, fragment: int) -> dict[int, Tensor]:
        """Wait for a fragment's results, by parameter; some have none if no worker's counts."""
        self._under_way.remove(fragment)
        tensors, slots = self._synchronizer.plan.fragments[fragment], self._synchronizer.slots
        self._synchronizer.driver.wait(tensors)
        found = {}
        for tensor in sorted(self._outer.weights.keys() & set(tensors)):
            result, slots.results[tensor] = slots.results[tensor], None
            slots.contributions[tensor] = None
            if result is not None:
                found[tensor] = result
        return found

    @torch.no_grad()
    def _merge(self, fragment: int) -> None:
        """Update a fragment's outer weights, and go on from these."""
        mix = self._local.mix
        for tensor, result in self._results_of(fragment).items():
            theta = self._outer.weights[tensor]
            theta.copy_(result) if self._servers_apply else self._outer.update(tensor, result)
            own = self._synchronizer.inventory.tensors[tensor].data
            if mix:
                # What this round has kept back counts later, so it must not stay in the weights,
                # too; what earlier rounds had kept back was sent, and is not in them yet.
                own += self._kept_back(tensor) - self._kept_before.pop(tensor)
                own.lerp_(theta, 1.0 - mix)
            else:
                own.copy_(theta)

    def _kept_back(self, tensor: int) -> Tensor | float:
        """The part of this worker's outer gradient that its codec has not sent yet."""
        if self._links is None:
            return 0.0
        return residual_of(self._synchronizer.plan, self._links, tensor, self._outer.weights)


def residual_of(
    plan: Plan, links: RoundChannel, tensor: int, like: Mapping[int, Tensor]
) -> Tensor | float:
    """A tensor's residual, put together from its chunks; 0 if its codec keeps nothing back."""
    whole: Tensor | None = None
    for chunk in (plan.chunks[index] for index in plan.layout.of_tensor(len(plan.specs))[tensor]):
        for segment, values in zip(chunk.segments, links.memories(chunk), strict=True):
            if segment.tensor == tensor and values is not None:
                whole = torch.zeros(plan.specs[tensor].numel) if whole is None else whole
                whole[segment.start : segment.stop] = torch.from_numpy(values)
    return 0.0 if whole is None else whole.to(like[tensor]).view_as(like[tensor])


class OuterState:
    """The inner optimizer's state and the outer one's; implements ``KeptState``.

    Args:
        own: The user's optimizer, which runs in this process.
        servers: Where servers apply: what they hold.
    """

    def __init__(self, own: OwnState, outer: OuterWeights, servers: ServerState | None) -> None:
        self._own, self._outer, self._servers = own, outer, servers

    def fetch(self) -> Held:
        held = self._own.fetch()
        if self._servers is None:
            held.momenta = self._outer.by_name(self._outer.momenta)
            return held
        at_servers = self._servers.fetch()
        held.weights, held.round = at_servers.weights, at_servers.round
        momenta = {name: kept.get(MOMENTUM) for name, kept in at_servers.state.items()}
        held.momenta = {name: v for name, v in momenta.items() if v is not None}
        return held

    def restore(self, saved: OptimizerState, averages: Named, momenta: Named) -> None:
        self._own.restore(saved, averages, {})
        self._outer.begin({} if self._servers else momenta)
        if self._servers is not None:
            state = {name: {MOMENTUM: v} for name, v in momenta.items()}
            self._servers.restore(OptimizerState("SGD", state, []), {}, {})


def as_torch(outer: Nesterov, parameters: Sequence[Tensor]) -> torch.optim.SGD:
    """The outer optimizer for servers, which run torch's own on their shards."""
    return torch.optim.SGD(
        parameters, lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0
    )
