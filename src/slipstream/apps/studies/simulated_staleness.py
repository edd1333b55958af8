"""Stale gradients in one process: the effect of asynchronous training on a model.

"Revisiting Distributed Synchronous SGD", section 2.1.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from slipstream.apps.studies.staleness import ramped_staleness
from slipstream.errors import ConfigError


def simulated_staleness(
    optimizer: torch.optim.Optimizer, *, steps: int, ramp_up: int = 0
) -> SimulatedStaleness:
    """Let ``optimizer.step()`` apply the gradients of ``steps`` steps ago from now on.

    The loop does not change::

        with simulated_staleness(optimizer, steps=20, ramp_up=3 * len(loader)):
            for x, y in loader:
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()

    Every gradient is applied once, in order, with the optimizer's settings and state at that time
    (its learning rate, its momentum); the last ``steps`` never are. Until there is one old enough,
    ``step()`` applies nothing: weights and optimizer state do not change. With ``ramp_up`` (in
    steps) staleness grows linearly from 0 to ``steps`` instead, and ``step()`` applies nothing
    whenever it grows by one. With ``steps=0`` training is unchanged, bit for bit.

    ``.grad`` is the fresh gradient again after ``step()``. Changes of ``.grad`` before it
    (clipping, for example) apply to the gradient that is used later. The waiting copies need
    ``steps`` times the memory of the gradients.
    """
    return SimulatedStaleness(optimizer, steps, ramp_up)


class SimulatedStaleness:
    """A delay of a loop's gradients before its optimizer uses them, until it is closed."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, ramp_up: int) -> None:
        ramped_staleness(0, staleness=steps, ramp_up=ramp_up)  # refuses invalid values
        self._steps, self._ramp_up = steps, ramp_up
        self._num_steps = 0
        self._queue: deque[dict[Tensor, Tensor]] = deque()
        self._fresh: dict[Tensor, Tensor | None] = {}
        self._handles = [
            optimizer.register_step_pre_hook(self._exchange),
            optimizer.register_step_post_hook(self._restore),
        ]

    @property
    def pending(self) -> int:
        """The number of waiting gradients; after a step, also the age of the next one in steps."""
        return len(self._queue)

    def close(self) -> None:
        """Let steps apply fresh gradients again; pending ones are never applied."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> SimulatedStaleness:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise ConfigError(
                f"{type(optimizer).__name__}.step(closure) computes gradients while it steps, so "
                "old ones cannot be put in their place; call backward() first, then step()"
            )
        allowed = ramped_staleness(self._num_steps, staleness=self._steps, ramp_up=self._ramp_up)
        self._num_steps += 1
        if not allowed:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._fresh = {p: p.grad for p in parameters}
        # Copies: the loop may zero or add to a gradient in place while it waits here.
        self._queue.append({p: g.detach().clone() for p, g in self._fresh.items() if g is not None})
        due = self._queue.popleft() if len(self._queue) > allowed else {}
        for parameter in parameters:
            parameter.grad = due.get(parameter)  # optimizers skip parameters without one

    def _restore(self, *_: object) -> None:
        for parameter, gradient in self._fresh.items():
            parameter.grad = gradient
        self._fresh = {}
