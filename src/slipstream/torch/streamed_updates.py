"""Where updates come back some clocks later: every worker applies the same ones in the same order.

What enters the optimizer may travel, or what the optimizer makes of it (``travels="steps"``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slipstream.errors import RuntimeFault
from slipstream.runtime.update_stream import UpdateStream
from slipstream.torch.synchronizer import Synchronizer

Settings = list[dict[str, Any]]  # by parameter group


class StreamedUpdates(Synchronizer):
    """An update is applied with the settings of its own clock, whatever the worker is at by then:
    a learning rate that changes would else make weights differ."""

    def __init__(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        super().__init__(*args)
        self._timeline = Timeline(optimizer, self.plan.consistency.rate(0))
        self._optimizer = optimizer
        self._trained = [
            (tensor, parameter)
            for tensor, parameter in enumerate(self._inventory.tensors)
            if self.plan.specs[tensor].role == "parameter"
        ]
        (self._stream,) = (e for e in self._exchanges if isinstance(e, UpdateStream))
        self._stream.apply = self._apply
        self._clock = 0

    def _gradient_ready(self, tensor: int) -> None:
        self._refuse_second_pass(str(self.plan.consistency))
        super()._gradient_ready(tensor)

    def pass_ended(self) -> None:
        if self.plan.schedule.leaves_during_backward:
            self.flush()
            self._note_left()

    def end_step(self) -> None:
        """Contribute this step, and apply updates until the next may begin."""
        self._check_all_exchanged(self._optimizer)
        self.tap.end()
        if self._changed_since():
            raise RuntimeFault(
                "gradients were changed between backward() and step() (clipping, a GradScaler?), "
                f"but with {self.plan.consistency} they have already left: use overlap=False, or "
                "staleness=0 to see and change the averaged ones"
            )
        self._left = []
        self._timeline.note(self._clock)
        if self.plan.travels == "steps":
            self._clear_refused()  # before the optimizer remembers them
            self._step_aside()
        self.before_step()
        self._clock += 1
        for exchange in self._exchanges:
            exchange.wait()
        self.after_step()

    def wait(self, tensors: Sequence[int] | None = None) -> None:
        """Until all steps that this worker has ended are in its weights."""
        with self._gradients_aside():
            self._stream.drain(self._clock)

    @contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """Updates are applied through ``.grad``; the loop may have its own there."""
        aside = [(parameter, parameter.grad) for _, parameter in self._trained]
        for parameter, _ in aside:
            parameter.grad = None
        yield
        for parameter, gradient in aside:
            parameter.grad = gradient

    @torch.no_grad()
    def _step_aside(self) -> None:
        """The optimizer's own step becomes what travels; weights stay as they are."""
        moved = [p for _, p in self._trained if p.grad is not None]
        before = [p.detach().clone() for p in moved]
        with self._timeline.at(self._clock):
            self._optimizer.step()
        for parameter, old in zip(moved, before, strict=True):
            parameter.grad = parameter - old
            parameter.copy_(old)

    @torch.no_grad()
    def _apply(self, clock: int, updated: Collection[int]) -> None:
        for tensor, parameter in self._trained:
            if tensor not in updated:
                parameter.grad = None
            elif self.plan.travels == "steps":
                assert parameter.grad is not None
                parameter.add_(parameter.grad)
        if self.plan.travels == "gradients":
            with self._timeline.at(clock):
                self._optimizer.step()


class Timeline:
    """An optimizer's settings as they were at every clock, while the loop goes on changing them.

    What changed is noted clock by clock. What the optimizer itself keeps in its groups (a counter,
    say) goes on from where its last step left it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        self._optimizer = optimizer
        self._factor = factor  # of learning rates
        self._seen = snapshot(self._groups)  # what the loop had set when it was last looked at
        self._used = snapshot(self._groups)  # what the optimizer's last step had, or left
        self._changes: dict[int, Settings] = {}

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """Asked for each time: a state that is loaded brings new ones."""
        return self._optimizer.param_groups

    def note(self, clock: int) -> None:
        """What the loop has changed since the clock before."""
        now = snapshot(self._groups)
        self._changes[clock] = [
            {name: new[name] for name in new if name not in old or differ(old[name], new[name])}
            for old, new in zip(self._seen, now, strict=True)
        ]
        self._seen = now

    @contextmanager
    def at(self, clock: int) -> Iterator[None]:
        """Within, the optimizer has the settings of this clock."""
        visible = [settings_of(group) for group in self._groups]
        changes = self._changes.pop(clock)
        for used, changed in zip(self._used, changes, strict=True):
            used.update(changed)
        for group, used in zip(self._groups, self._used, strict=True):
            group.update({**used, "lr": used["lr"] * self._factor} if "lr" in used else used)
        entered = [settings_of(group) for group in self._groups]
        try:
            yield
        finally:
            for place, group in enumerate(self._groups):
                for name, value in settings_of(group).items():
                    if name in entered[place] and value is entered[place][name]:
                        group[name] = visible[place][name]
                    else:  # the step itself has changed it
                        self._used[place][name] = self._seen[place][name] = value


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def snapshot(groups: Sequence[dict[str, Any]]) -> Settings:
    """Copies: schedulers change a rate that is a tensor in its place."""
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in settings_of(group).items()
        }
        for group in groups
    ]


def differ(old: Any, new: Any) -> bool:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return not torch.equal(old, new)
    return bool(old != new)
