"""Where updates come back some clocks later: every worker applies the same ones in the same order.

Workers send gradients, or the optimizer's update deltas (``payload="update"``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.plan import Plan
from slipstream.runtime.exchange.engine import Applier
from slipstream.runtime.exchange.update_stream import UpdateStream
from slipstream.torch.capture.loop_watch import LoopWatch
from slipstream.torch.capture.replica_check import (
    NONE_HANDED,
    ReplicaCheck,
    keeps_replicas_equal,
)
from slipstream.torch.capture.synchronizer import Synchronizer
from slipstream.torch.checkpoints.kept_state import StateAtWorker
from slipstream.torch.modes.networked import NetworkedMode
from slipstream.torch.modes.pair_parts import PairParts
from slipstream.torch.modes.pair_setup import PairSetup
from slipstream.torch.modes.weights_at_servers import no_shared_weights
from slipstream.torch.optimizers.loop_optimizer import LoopOptimizer
from slipstream.torch.tensors.averages import Averages
from slipstream.torch.tensors.inventory import Inventory, group_settings
from slipstream.torch.tensors.layer_math import is_shared
from slipstream.torch.tensors.slots import LiveTensors

Settings = list[dict[str, Any]]  # by parameter group


class StreamedMode(NetworkedMode):
    """Every worker applies the same updates in the same order, some clocks after its own step."""

    def _wire(self, setup: PairSetup) -> PairParts:
        plan, inventory = setup.plan, setup.inventory
        loop = setup.loop or LoopOptimizer(setup.optimizer)
        averages = Averages(setup.model, plan.update.average, inventory.parameter_names)
        clocked = ClockedOptimizer(plan, inventory, setup.slots, loop, averages)
        channels = setup.channels(partial(UpdateStream, apply=clocked.apply))
        assert isinstance(channels.links, UpdateStream)
        applier = partial(
            StreamedUpdates,
            loop=loop,
            clocked=clocked,
            stream=channels.links,
            is_first=setup.is_first("overlap"),
        )
        state, check = StateAtWorker(setup.model, loop, averages), None
        if keeps_replicas_equal(plan):
            check = partial(
                ReplicaCheck, own=None, of_loop=loop, member=setup.member, handed=NONE_HANDED
            )
        return setup.parts(loop, channels, applier, state, setup.accounting(), check)

    def outer_weights(self) -> None:
        if self.parts[0].check is None:  # workers may have applied different updates so far
            raise no_shared_weights(self._name)


class StreamedUpdates(Applier):
    """Sends a contribution a clock, and lets updates be applied.

    Args:
        loop: The optimizer that the training loop uses; its ``step`` ends a step here.
        clocked: Applies the updates.
        stream: Receives them.
        is_first: Whether this worker is the one that warns.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        loop: LoopOptimizer,
        clocked: ClockedOptimizer,
        stream: UpdateStream,
        is_first: Callable[[], bool] = lambda: True,
    ) -> None:
        self._synchronizer, self._optimizer = synchronizer, loop.local
        self._clocked, self._stream = clocked, stream
        loop.attach(self.end_step)
        self._steps = synchronizer.plan.update.inner.travels == "steps"
        self._clock = 0
        self._watch = LoopWatch(synchronizer, hooked=lambda: loop.has_pre_hooks, is_first=is_first)

    def takes_pass(self) -> bool:
        """No: one contribution a clock."""
        self._watch.note_late_pass()
        return False

    def pass_ended(self) -> None:
        if self._synchronizer.plan.schedule.leaves_during_backward and not self._watch.late_pass:
            self._synchronizer.flush()
            self._synchronizer.gradients.note_left()

    def end_step(self) -> None:
        """Send this step's contribution, and apply updates until the next step may begin."""
        synchronizer = self._synchronizer
        synchronizer.gradients.refuse_unknown(self._optimizer)
        synchronizer.tap.end()
        self._watch.examine()
        self._clocked.note(self._clock)
        if self._steps:
            synchronizer.gradients.clear_refused()  # before they enter the optimizer's state
            synchronizer.gradients.clip()
            self._clocked.make_step(self._clock)
        synchronizer.end_exchange()
        if self._steps:
            self._clocked.forget_step()
        self._clock += 1
        synchronizer.driver.wait()
        synchronizer.end_step()

    def wait(self, tensors: Sequence[int] | None = None) -> None:
        """Wait until all steps that this worker has ended are in its weights."""
        self._stream.drain(self._clock)


class ClockedOptimizer:
    """Lets the user's optimizer make updates of earlier clocks, which have memory of their own.

    An update is applied with the settings of its own clock, not of the worker's current clock:
    otherwise a changing learning rate would make weights differ.

    Args:
        slots: The updates are in its ``results``.
        loop: The optimizer that the training loop uses.
        averages: Follow each update of the weights.
    """

    def __init__(
        self,
        plan: Plan,
        inventory: Inventory,
        slots: LiveTensors,
        loop: LoopOptimizer,
        averages: Averages,
    ) -> None:
        self._step, self._averages = loop.step_local, averages
        self._timeline = Timeline(loop.local, plan.consistency.rate(0))
        self._trained = [(i, inventory.tensors[i]) for i in inventory.parameters]
        self._steps = plan.update.inner.travels == "steps"
        self._contributions, self._updates = slots.contributions, slots.results
        layers = (unit.layer for unit in plan.units if unit.layer is not None)
        self._of_layers = [tensor for layer in layers for tensor in layer.tensors]

    def note(self, clock: int) -> None:
        """Record the settings of this clock."""
        self._timeline.note(clock)

    @torch.no_grad()
    def make_step(self, clock: int) -> None:
        """Let the optimizer step, contribute its change of the weights, and undo it here."""
        before = [p.detach().clone() if p.grad is not None else None for _, p in self._trained]
        with self._timeline.at(clock):
            self._step()
        for (tensor, parameter), old in zip(self._trained, before, strict=True):
            self._contributions[tensor] = None if old is None else parameter - old
            if old is not None:
                parameter.copy_(old)

    def forget_step(self) -> None:
        """Free a step that was encoded; messages in flight keep their own memory alive."""
        for tensor, _ in self._trained:
            self._contributions[tensor] = None

    @torch.no_grad()
    def apply(self, clock: int, updated: Collection[int]) -> None:
        """Apply one update, which is in memory; the gradients of the loop do not change."""
        self._averages.before_update()
        updates = [self._updates[t] if t in updated else None for t, _ in self._trained]
        if self._steps:
            for (_, parameter), update in zip(self._trained, updates, strict=True):
                if update is not None:
                    parameter.add_(update)
        else:
            with self._as_gradients(updates), self._timeline.at(clock):
                self._step()
        for tensor in self._of_layers:
            self._updates[tensor] = None  # otherwise the next product would be added to this one
        self._averages.follow()

    @contextmanager
    def _as_gradients(self, updates: Sequence[Tensor | None]) -> Iterator[None]:
        """Torch's optimizers read only ``.grad``, so the update is there during a step. Afterwards
        the loop's own gradients are put back, the same objects."""
        own = [parameter.grad for _, parameter in self._trained]
        for (_, parameter), update in zip(self._trained, updates, strict=True):
            parameter.grad = None if update is None else update.detach()
        try:
            yield
        finally:
            for (_, parameter), gradient in zip(self._trained, own, strict=True):
                parameter.grad = gradient
        for tensor, _ in self._trained:
            held = self._updates[tensor]
            if held is not None and is_shared(held):
                self._updates[tensor] = None  # the optimizer has kept it


class Timeline:
    """An optimizer's settings at every clock, while the loop continues to change them.

    Changes are recorded clock by clock. Values that the optimizer itself keeps in its groups (a
    counter, for example) continue from its last step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        self._optimizer = optimizer
        self._factor = factor  # of learning rates
        self._seen = snapshot(self._groups)  # the loop's settings at the last check
        self._used = snapshot(self._groups)  # the settings after the optimizer's last step
        self._changes: dict[int, Settings] = {}

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """Read each time: loading a state replaces the groups."""
        return self._optimizer.param_groups

    def note(self, clock: int) -> None:
        """Record what the loop has changed since the clock before."""
        now = snapshot(self._groups)
        self._changes[clock] = [
            {name: new[name] for name in new if name not in old or differ(old[name], new[name])}
            for old, new in zip(self._seen, now, strict=True)
        ]
        self._seen = now

    @contextmanager
    def at(self, clock: int) -> Iterator[None]:
        """Within, the optimizer has the settings of this clock."""
        visible = [group_settings(group) for group in self._groups]
        changes = self._changes.pop(clock)
        for used, changed in zip(self._used, changes, strict=True):
            used.update(changed)
        for group, used in zip(self._groups, self._used, strict=True):
            group.update({**used, "lr": used["lr"] * self._factor} if "lr" in used else used)
        entered = [group_settings(group) for group in self._groups]
        try:
            yield
        finally:
            for place, group in enumerate(self._groups):
                for name, value in group_settings(group).items():
                    if name in entered[place] and value is entered[place][name]:
                        group[name] = visible[place][name]
                    else:  # the step itself has changed the value
                        self._used[place][name] = self._seen[place][name] = value


def snapshot(groups: Sequence[dict[str, Any]]) -> Settings:
    """Copies, since schedulers change a learning rate that is a tensor in place."""
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group_settings(group).items()
        }
        for group in groups
    ]


def differ(old: Any, new: Any) -> bool:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return not torch.equal(old, new)
    return bool(old != new)
