"""Notices a loop that makes backward passes, and never calls ``optimizer.step()``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

UNUSED_PASSES = 5  # warm-up passes and the skipped steps of a GradScaler are fewer, as a rule


class StepWatch:
    """Counts gradients that no step can use any more, until the first step of any pair.

    Passes that accumulate add to one gradient, on weights that stay as they are. A loop that
    updates weights by hand changes weights between passes, or begins each with a new gradient. So
    does LBFGS, which makes many passes by its closure, but within a step.

    Args:
        parameters: Of all pairs. One of them is watched: the first that gets a gradient.
        optimizers: Of all pairs.
        stepped: Whether a step was made, or gradients were exchanged without one.
        told: The warning, given once, in the backward pass after ``UNUSED_PASSES`` others.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        optimizers: Iterable[Optimizer],
        stepped: Callable[[], bool],
        told: str,
    ) -> None:
        self._stepped, self._told, self._stepping = stepped, told, False
        self._watched: Tensor | None = None
        self._gradient: Tensor | None = None
        self._version = -1  # of the weights; what arrives from other workers does not change it
        self._unused = 0
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in parameters
            if parameter.requires_grad  # it may have been frozen since an earlier job.distribute
        ]
        if self._handles:
            for optimizer in optimizers:
                self._handles.append(optimizer.register_step_pre_hook(self._begin_step))

    def _begin_step(self, *_: Any) -> None:
        self._stepping = True  # this hook cannot be removed while it runs

    def _accumulated(self, parameter: Tensor) -> None:
        if self._stepping or self._stepped():
            self.close()
            return
        if self._watched is None:
            self._watched, self._gradient = parameter, parameter.grad
            self._version = parameter._version
        if parameter is not self._watched:
            return
        same = parameter.grad is self._gradient and parameter._version == self._version
        self._unused += not same
        self._gradient, self._version = parameter.grad, parameter._version
        if self._unused == UNUSED_PASSES:
            self.close()
            warnings.warn(self._told, stacklevel=5)  # the line with backward()

    def close(self) -> None:
        """Remove all hooks."""
        self._watched = self._gradient = None
        while self._handles:
            self._handles.pop().remove()
