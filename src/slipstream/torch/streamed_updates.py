"""Where updates come back some clocks later: every worker applies the same ones in the same order.

What enters the optimizer may travel, or what the optimizer makes of it (``travels="steps"``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from slipstream.errors import RuntimeFault
from slipstream.runtime.update_stream import UpdateStream
from slipstream.torch.synchronizer import Synchronizer

GroupSettings = list[dict[str, Any]]


class StreamedUpdates(Synchronizer):
    """An update is applied with the settings of its own clock, whatever the worker is at by then:
    a learning rate that changes would else make weights differ."""

    def __init__(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        super().__init__(*args)
        self._optimizer = optimizer
        self._settings: dict[int, GroupSettings] = {}
        self._trained = [
            (tensor, parameter)
            for tensor, parameter in enumerate(self._inventory.tensors)
            if self.plan.specs[tensor].role == "parameter"
        ]
        (self._stream,) = (e for e in self._exchanges if isinstance(e, UpdateStream))
        self._stream.apply = self._apply
        self._clock = 0

    def _gradient_ready(self, tensor: int) -> None:
        if self.exchanged:
            raise RuntimeFault(
                f"a second backward() before step(), but with {self.plan.consistency} the first "
                "one's gradients have already left: put all passes but the last into "
                "`with job.accumulate():`, or use overlap=False"
            )
        super()._gradient_ready(tensor)

    def pass_ended(self) -> None:
        if self.plan.schedule.leaves_during_backward:
            self.flush()

    def end_step(self) -> None:
        """Contribute this step, and apply updates until the next may begin."""
        self._check_all_exchanged(self._optimizer)
        self._settings[self._clock] = settings_by_group(self._optimizer)
        self.tap.end()
        if self.plan.travels == "steps":
            self._step_aside()
        self.before_step()
        self._clock += 1
        for exchange in self._exchanges:
            exchange.wait()
        self.after_step()

    def wait(self, tensors: Sequence[int] | None = None) -> None:
        """Until all that this worker has contributed is in its weights."""
        self._stream.drain()

    @torch.no_grad()
    def _step_aside(self) -> None:
        """The optimizer's own step becomes what travels; weights stay as they are."""
        moved = [p for _, p in self._trained if p.grad is not None]
        before = [p.detach().clone() for p in moved]
        self._run(self._settings[self._clock])
        for parameter, old in zip(moved, before, strict=True):
            assert parameter.grad is not None
            torch.sub(parameter, old, out=parameter.grad)
            parameter.copy_(old)

    @torch.no_grad()
    def _apply(self, clock: int, updated: Collection[int]) -> None:
        settings = self._settings.pop(clock)
        for tensor, parameter in self._trained:
            if tensor not in updated:
                parameter.grad = None
        if self.plan.travels == "gradients":
            self._run(settings)
            return
        for tensor, parameter in self._trained:
            if tensor in updated:
                assert parameter.grad is not None
                parameter.add_(parameter.grad)

    def _run(self, settings: GroupSettings) -> None:
        """The optimizer, once, with these settings instead of its own."""
        own = settings_by_group(self._optimizer)
        factor = self.plan.consistency.rate(0)
        for group, then in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(then, lr=then["lr"] * factor)
        self._optimizer.step()
        for group, now in zip(self._optimizer.param_groups, own, strict=True):
            group.update(now)


def settings_by_group(optimizer: torch.optim.Optimizer) -> GroupSettings:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


class StreamedOptimizer(torch.optim.Optimizer):
    """What the loop and schedulers see; the user's own optimizer runs once an update."""

    def __init__(self, local: torch.optim.Optimizer) -> None:
        super().__init__(local.param_groups, local.defaults)
        self.local = local
        self.param_groups, self.state = local.param_groups, local.state
        self.synchronizer: StreamedUpdates | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.local.load_state_dict(state_dict)
        self.param_groups, self.state = self.local.param_groups, self.local.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.synchronizer is not None:
            self.synchronizer.end_step()
        # A scheduler made before job.distribute watches the local one.
        setattr(self.local, "_opt_called", True)  # noqa: B010
        return loss
