"""Where workers train on weights of their own, and outer rounds bring these together (DiLoCo)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.codecs.residual import Floats
from slipstream.plan import Plan
from slipstream.runtime.exchange.engine import Applier
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.torch.capture.synchronizer import Synchronizer
from slipstream.torch.checkpoints.loaded_weights import LoadedWeights
from slipstream.torch.checkpoints.outer_weights import OuterWeights
from slipstream.torch.checkpoints.server_state import ServerState
from slipstream.torch.checkpoints.training_state import LocalState
from slipstream.torch.tensors.finite_gradients import before_use
from slipstream.torch.tensors.staging import as_real, shaped_as
from slipstream.types import Segment
from slipstream.updates import LocalSteps


@dataclass(slots=True)
class Arrived:
    """A tensor's result, before it is merged.

    Attributes:
        result: None if no worker's contribution counted, since none was finite.
        counted: Whether this worker's outer gradient did.
        kept: What this worker's codec has kept back of it, less what it had kept back before.
    """

    result: Tensor | None
    counted: bool
    kept: Tensor | float = 0.0


class OuterUpdates(Applier):
    """The user's optimizer steps on this worker's weights.

    After the steps that ``LocalSteps`` names, a fragment's outer gradients are sent, or its results
    are merged.

    Args:
        optimizer: The user's own.
        outer: The weights that all workers have in common.
        loaded: Takes weights that were loaded before the first step.
        links: The channel whose codecs may keep a part of an outer gradient back, if there is one.
        servers: The outer weights that servers have, where these apply.

    Attributes:
        outer: The weights that all workers have in common.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        optimizer: torch.optim.Optimizer,
        outer: OuterWeights,
        loaded: LoadedWeights,
        links: RoundChannel | None,
        servers: ServerState | None,
    ) -> None:
        assert synchronizer.plan.local_steps is not None
        self._local: LocalSteps = synchronizer.plan.local_steps
        self._synchronizer, self.outer, self._links = synchronizer, outer, links
        self._loaded = loaded
        self._servers = servers
        self._kept_before: dict[int, Tensor | float] = {}  # when a fragment was sent
        self._under_way: list[int] = []  # fragments, in the order in which they were sent
        self._arrived: dict[int, Arrived] = {}  # of fragments under way
        self._alike_after = 0  # the step after which all workers had the outer weights
        self._begun = False
        self.hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_pre_hook(before_use(self._examine)),
            optimizer.register_step_post_hook(self._after_step),
        ]

    # ---- steps of the loop

    def takes_pass(self) -> bool:
        """Nothing leaves in a backward pass, so passes add up."""
        return True

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._synchronizer.refuse_step_in_block()
        if not self._begun:
            self._take_loaded_weights()
        self._begun = True
        self._synchronizer.gradients.refuse_unknown(optimizer)

    def _take_loaded_weights(self) -> None:
        """Go on from the weights that the loop has loaded since job.distribute, if it has."""
        loaded = self._loaded.take()
        if loaded and self._servers is not None:
            self._servers.take_loaded_weights(loaded)

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
        """Merge what is under way; not while the model has other weights."""
        while self._under_way and not self._synchronizer.driver.frozen_in:
            self._merge(self._under_way[0])

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give all workers the same weights; every rank calls it after the same step.

        They are the mean of the workers' weights: the outer optimizer is for whole rounds. Where
        servers apply, it is a round like any other. If no worker ``has_steps``, has ``changed`` or
        ``moved`` weights, there is nothing to exchange.
        """
        self.wait()
        tensors, outer = self._synchronizer.inventory.tensors, self.outer
        everything = range(len(self._synchronizer.plan.fragments))
        self._send(everything)
        for fragment in everything:
            for tensor, arrived in self._results_of(fragment):
                theta, mean = outer.weights[tensor], arrived.result
                if mean is not None:
                    if self._servers is None:
                        theta.sub_(mean)
                    else:
                        theta.copy_(mean)
                tensors[tensor].data.copy_(theta)
        self._alike_after = self._synchronizer.step

    @torch.no_grad()
    def _send(self, fragments: Collection[int]) -> None:
        """Send the outer gradients of some fragments; the others take no part in this round."""
        synchronizer, plan = self._synchronizer, self._synchronizer.plan
        taking_part = {tensor for f in fragments for tensor in plan.fragments[f]}
        for tensor in self.outer.weights:
            if tensor in taking_part:
                own = synchronizer.inventory.tensors[tensor]
                synchronizer.slots.contributions[tensor] = self.outer.seen(tensor) - own
                if self._local.mix:
                    self._kept_before[tensor] = self._kept_back(tensor)
        others = set(range(len(plan.specs))) - taking_part
        for channel in synchronizer.driver.channels:
            channel.skip_round(others)
        synchronizer.flush()
        synchronizer.driver.exchanged = False  # it was no exchange of this step's gradients
        self._under_way += fragments

    def receive(self) -> None:
        """Wait for the results of what is under way, which are merged when it is time."""
        for fragment in self._under_way:
            self._receive(fragment)

    def _receive(self, fragment: int) -> None:
        tensors, slots = self._synchronizer.plan.fragments[fragment], self._synchronizer.slots
        self._synchronizer.driver.wait(tensors)
        for tensor in (tensor for tensor in tensors if tensor not in self._arrived):
            arrived = Arrived(slots.results[tensor], slots.contributions[tensor] is not None)
            slots.results[tensor] = slots.contributions[tensor] = None
            before = self._kept_before.pop(tensor, None)
            if before is not None and arrived.counted:
                arrived.kept = self._kept_back(tensor) - before
            self._arrived[tensor] = arrived

    def _results_of(self, fragment: int) -> Iterator[tuple[int, Arrived]]:
        """Wait for a fragment's results, and write those of buffers into the model.

        Yields:
            A parameter's number, and its result.
        """
        self._receive(fragment)
        self._under_way.remove(fragment)
        for tensor in self._synchronizer.plan.fragments[fragment]:
            arrived = self._arrived.pop(tensor)
            if tensor in self.outer.weights:
                yield tensor, arrived
            elif arrived.result is not None:
                self._synchronizer.slots.replace_buffer(tensor, arrived.result)

    @torch.no_grad()
    def _merge(self, fragment: int) -> None:
        """Update a fragment's outer weights, and go on from these."""
        mix = self._local.mix
        for tensor, arrived in self._results_of(fragment):
            theta, result = self.outer.weights[tensor], arrived.result
            if result is not None:
                if self._servers is None:
                    self.outer.update(tensor, result)
                else:
                    theta.copy_(result)
            own = self._synchronizer.inventory.tensors[tensor].data
            if mix and arrived.counted:
                # What this round has kept back counts later, so it must not stay in the weights,
                # too; what earlier rounds had kept back was sent, and is not in them yet.
                own += arrived.kept
                own.copy_(own.to(theta.dtype).lerp_(theta, 1.0 - mix))
            else:
                own.copy_(theta)
        if not (mix or self._local.fragments > 1 or self._local.overlap_steps):
            self._alike_after = self._synchronizer.step + 1

    # ---- what a worker has of its own, for checkpoints

    def follow(self) -> bool:
        """All workers have changed their weights alike: these are the outer ones from now on.

        Returns:
            False where servers have the outer weights: they need a round.
        """
        if self._servers is None:
            self.outer.follow(self.outer.loaded())
            self._synchronizer.slots.know_buffers()
        return self._servers is None

    @property
    def has_steps(self) -> bool:
        """Whether workers have made steps since all of them got the outer weights."""
        return bool(self._under_way) or self._alike_after != self._synchronizer.step

    @property
    def moved(self) -> bool:
        """Whether forward passes alone have changed something since then: a batch norm's buffers,
        or a table with ``max_norm``. Where servers apply, a round without steps would do harm."""
        by_forward = self.outer.renormed() or bool(self._synchronizer.slots.changed_buffers())
        return by_forward and self._servers is None

    @property
    def changed(self) -> str:
        """The first parameter that the loop has changed since then; empty if there is none."""
        changed = self.outer.loaded()
        return self._synchronizer.plan.specs[changed[0]].name if changed else ""

    def local_state(self) -> LocalState:
        """What is under way, and what codecs have kept back where nobody else saves it.

        It waits for the results of what is under way.
        """
        self.receive()
        names = [spec.name for spec in self._synchronizer.plan.specs]
        kept = {i: a.kept for i, a in self._arrived.items() if isinstance(a.kept, Tensor)}
        return LocalState(
            repr(self._local),
            not (self.has_steps or self.changed or self.moved),
            list(self._under_way),
            {names[i]: a.result for i, a in self._arrived.items() if a.result is not None},
            [names[i] for i, a in self._arrived.items() if a.counted],
            {names[i]: value for i, value in kept.items()},
            {names[i]: value for i, value in self._unsaved_residuals() if value is not None},
        )

    def _unsaved_residuals(self) -> Iterator[tuple[int, Tensor | None]]:
        """By parameter: its residual; None if there is none."""
        if self._servers is not None and self._links is not None:
            for tensor in self.outer.weights:
                kept = self._kept_back(tensor)
                yield tensor, kept if isinstance(kept, Tensor) else None

    def resume(self, saved: LocalState | None) -> None:
        """Weights were loaded, and the step is set: go on as that worker would have.

        Args:
            saved: What the worker of this rank had; None: all have the outer weights.
        """
        self._kept_before.clear()
        self._arrived.clear()
        self._under_way.clear()
        self._alike_after = self._synchronizer.step
        if saved is None:
            return
        self._begun = True  # the outer weights are not the model's
        for tensor, _ in self._unsaved_residuals():
            residual = saved.residuals.get(self._synchronizer.plan.specs[tensor].name)
            if residual is not None and self._links is not None:
                set_residual(self._synchronizer.plan, self._links, tensor, residual)
        if not saved.alike:
            self._alike_after = -1
        plan = self._synchronizer.plan
        self._under_way += saved.under_way
        for fragment in saved.under_way:
            for tensor in plan.fragments[fragment]:
                name = plan.specs[tensor].name
                own = self._synchronizer.inventory.tensors[tensor]
                result, kept = (
                    None if value is None else value.to(own.device)
                    for value in (saved.results.get(name), saved.kept.get(name))
                )
                counted = name in saved.counted
                self._arrived[tensor] = Arrived(result, counted, 0.0 if kept is None else kept)

    def _kept_back(self, tensor: int) -> Tensor | float:
        """The part of this worker's outer gradient that its codec has not sent yet."""
        if self._links is None:
            return 0.0
        return residual_of(self._synchronizer.plan, self._links, tensor, self.outer.weights)


def residual_of(
    plan: Plan, links: RoundChannel, tensor: int, like: Mapping[int, Tensor]
) -> Tensor | float:
    """A tensor's residual, put together from its chunks; 0 if its codec keeps nothing back."""
    whole: Tensor | None = None
    for segment, values in residual_parts(plan, links, tensor):
        whole = torch.zeros(plan.specs[tensor].numel) if whole is None else whole
        whole[segment.start : segment.stop] = torch.from_numpy(values)
    if whole is None:
        return 0.0
    return shaped_as(like[tensor], whole.to(as_real(like[tensor])))


def set_residual(plan: Plan, links: RoundChannel, tensor: int, saved: Tensor) -> None:
    """Replace a tensor's residual."""
    flat = as_real(saved).reshape(-1).cpu()
    for segment, values in residual_parts(plan, links, tensor):
        values[:] = flat[segment.start : segment.stop].numpy()


def residual_parts(
    plan: Plan, links: RoundChannel, tensor: int
) -> Iterator[tuple[Segment, Floats]]:
    """The parts of a tensor's residual, themselves and no copies; none if nothing is kept back."""
    for chunk in (c for c in plan.chunks if any(s.tensor == tensor for s in c.segments)):
        for segment, values in zip(chunk.segments, links.memories(chunk), strict=True):
            if segment.tensor == tensor and values is not None:
                yield segment, values
