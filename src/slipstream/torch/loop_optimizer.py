"""The optimizer that the loop and schedulers see, where ``step`` does more than the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def kind_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The type of the user's own optimizer, whichever one the loop uses."""
    return type(optimizer.local if isinstance(optimizer, LoopOptimizer) else optimizer)


class LoopOptimizer(torch.optim.Optimizer):
    """Shares the user's parameter groups and state.

    A ``GradScaler`` sees gradients of this worker only, and may find an infinity where others find
    none. It calls ``step`` all the same, because of ``_step_supports_amp_scaling``, and gives it
    ``found_inf`` and ``grad_scale``. So a worker that skips a step makes it without gradients.

    Attributes:
        local: The user's own optimizer.
        end_step: What ``step`` does.
    """

    _step_supports_amp_scaling = True

    def __init__(self, local: torch.optim.Optimizer) -> None:
        super().__init__(local.param_groups, local.defaults)
        self.local = local
        self.param_groups, self.state = local.param_groups, local.state
        self.end_step: Callable[[], None] = lambda: None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.local.load_state_dict(state_dict)
        self.param_groups, self.state = self.local.param_groups, self.local.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._unscale()
        self.end_step()
        # A scheduler made before job.distribute watches the local one.
        setattr(self.local, "_opt_called", True)  # noqa: B010
        return loss

    @torch.no_grad()
    def _unscale(self) -> None:
        """Do what a ``GradScaler`` leaves to the optimizer; no gradient counts if one is
        infinite."""
        # The scaler sets both for this step only; no scale: the loop has unscaled them itself.
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is None:
            return
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if float(found):
            for parameter in trained:
                parameter.grad = None
        elif scale is not None:
            for parameter in trained:
                parameter.grad.div_(scale.to(parameter.grad.device))
