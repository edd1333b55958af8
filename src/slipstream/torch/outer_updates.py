"""Where workers train on weights of their own, and outer rounds bring these together (DiLoCo)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.files.checkpoint_format import OptimizerState
from slipstream.torch.finite_gradients import before_use
from slipstream.torch.inventory import Inventory
from slipstream.torch.kept_state import Held, Named, OwnState
from slipstream.torch.server_state import ServerState
from slipstream.torch.staging import as_real, shaped_as
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
        # A checkpoint may hold more: of layers that are frozen in this job.
        trained = {name: i for i, name in self._names.items() if name in momenta}
        self.momenta = {i: momenta[name].to(self.weights[i]) for name, i in trained.items()}

    def copies(self) -> dict[str, Tensor]:
        """θ by the parameter's name, in memory that no update changes."""
        return {self._names[i]: theta.clone() for i, theta in self.weights.items()}

    def momenta_by_name(self) -> dict[str, Tensor]:
        """v by the parameter's name."""
        return {self._names[i]: v for i, v in self.momenta.items()}

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
        self._alike_after = 0  # the step after which all workers had the outer weights
        self._begun = False
        self.hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_pre_hook(before_use(self._examine)),
            optimizer.register_step_post_hook(self._after_step),
        ]

    # ---- steps of the loop

    def pass_ended(self) -> None:
        """Gradients are this worker's own affair."""

    def begin_step(self) -> None:
        """What is under way stays so."""

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._synchronizer.driver.frozen:
            raise RuntimeFault(
                "optimizer.step() within job.outer_weights(), where the model has lent weights: "
                "train after the block"
            )
        if not self._begun and not self._servers_apply:
            # The loop may have loaded other weights since job.distribute, the same on all ranks.
            self._outer.begin(self._outer.momenta_by_name())
        self._begun = True
        self._synchronizer.gradients.refuse_unknown(optimizer)

    def _examine(self) -> None:
        """This worker's gradients are complete, and its optimizer is about to use them."""
        self._synchronizer.tap.end()
        self._synchronizer.gradients.clear_refused()
        self._synchronizer.gradients.clip()

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
        """Merge what is under way; not while the model has lent weights."""
        while self._under_way and not self._synchronizer.driver.frozen:
            self._merge(self._under_way[0])

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give all workers the same weights; every rank calls it after the same step.

        They are the mean of the workers' weights: the outer optimizer is for whole rounds. Where
        servers apply, it is a round like any other.

        Raises:
            RuntimeFault: The model has lent weights.
        """
        if self._synchronizer.driver.frozen:
            raise RuntimeFault("job.flush() within job.outer_weights(): call it after the block")
        self.wait()
        if self._alike_after == self._synchronizer.step:
            return
        tensors, outer = self._synchronizer.inventory.tensors, self._outer
        everything = range(len(self._synchronizer.plan.fragments))
        self._send(everything)
        for fragment in everything:
            for tensor, mean, _ in self._results_of(fragment):
                theta = outer.weights[tensor]
                if mean is not None:
                    theta.copy_(mean) if self._servers_apply else theta.sub_(mean)
                tensors[tensor].data.copy_(theta)
        self._kept_before.clear()
        self._alike_after = self._synchronizer.step

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
        synchronizer.driver.exchanged = False  # it was no exchange of this step's gradients
        self._under_way += fragments

    def _results_of(self, fragment: int) -> Iterator[tuple[int, Tensor | None, bool]]:
        """Wait for a fragment's results.

        Yields:
            A parameter's number, its result, and whether this worker's outer gradient counted. If
            no worker's counted, since none was finite, there is no result.
        """
        self._under_way.remove(fragment)
        tensors, slots = self._synchronizer.plan.fragments[fragment], self._synchronizer.slots
        self._synchronizer.driver.wait(tensors)
        for tensor in sorted(self._outer.weights.keys() & set(tensors)):
            result, slots.results[tensor] = slots.results[tensor], None
            counted = slots.contributions[tensor] is not None
            slots.contributions[tensor] = None
            yield tensor, result, counted

    @torch.no_grad()
    def _merge(self, fragment: int) -> None:
        """Update a fragment's outer weights, and go on from these."""
        mix = self._local.mix
        for tensor, result, counted in self._results_of(fragment):
            theta = self._outer.weights[tensor]
            if result is not None:
                theta.copy_(result) if self._servers_apply else self._outer.update(tensor, result)
            own = self._synchronizer.inventory.tensors[tensor].data
            if mix and counted:
                # What this round has kept back counts later, so it must not stay in the weights,
                # too; what earlier rounds had kept back was sent, and is not in them yet.
                own += self._kept_back(tensor) - self._kept_before.pop(tensor)
                own.lerp_(theta, 1.0 - mix)
            else:
                own.copy_(theta)
        if not (mix or self._local.fragments > 1 or self._local.overlap_steps):
            self._alike_after = self._synchronizer.step + 1

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
    for chunk in (c for c in plan.chunks if any(s.tensor == tensor for s in c.segments)):
        for segment, values in zip(chunk.segments, links.memories(chunk), strict=True):
            if segment.tensor == tensor and values is not None:
                whole = torch.zeros(plan.specs[tensor].numel) if whole is None else whole
                whole[segment.start : segment.stop] = torch.from_numpy(values)
    if whole is None:
        return 0.0
    return shaped_as(like[tensor], whole.to(as_real(like[tensor])))


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
            held.momenta = self._outer.momenta_by_name()
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
