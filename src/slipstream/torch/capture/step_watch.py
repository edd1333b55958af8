"""Notices a loop that changes weights between backward passes, and never calls ``step()``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from slipstream.torch.tensors.script_lines import level_of_the_script

CHANGES = 5  # of weights; a script may load some before its first step
SAMPLE = 8  # values of a parameter


class Seen(NamedTuple):
    """A parameter at the end of a backward pass."""

    gradient: Tensor | None
    state: tuple[int, int]
    sample: list[float]

    @classmethod
    def of(cls, parameter: Tensor) -> Seen:
        """The state of now."""
        state = parameter._version, parameter.data_ptr()
        return cls(parameter.grad, state, parameter.detach().ravel()[:SAMPLE].tolist())

    def is_changed(self, before: Seen) -> bool:
        """Whether this process has changed the weights since.

        Weights that arrive from other workers change the values alone, as does a loop that updates
        through ``.data``. But such a loop begins each pass with a new gradient.
        """
        if self.state != before.state:
            return True
        return self.gradient is not before.gradient and self.sample != before.sample


class StepWatch:
    """Counts changes of weights between backward passes, until the first step of any pair.

    Passes that accumulate leave the weights as they are, and so do a GradScaler's skipped steps.
    LBFGS changes weights between the passes of its closure, but within a step.

    Args:
        parameters: Of all pairs. One of them is watched: the first that gets a gradient.
        optimizers: Of all pairs.
        stepped: Whether a step was made, or gradients were exchanged without one.
        told: The warning, given once, in the backward pass after ``CHANGES`` changes.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        optimizers: Iterable[Optimizer],
        stepped: Callable[[], bool],
        told: str,
    ) -> None:
        self._stepped, self._told, self._stepping = stepped, told, False
        self._optimizers = list(optimizers)
        self._watched: Tensor | None = None
        self._seen: Seen | None = None
        self._changes = 0
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in parameters
            if parameter.requires_grad  # it may have been frozen since an earlier job.distribute
        ]
        if self._handles:
            self._handles.append(register_optimizer_step_pre_hook(self._begin_step))

    def _begin_step(self, optimizer: Optimizer, *_: Any) -> None:
        # This hook cannot be removed while it runs.
        self._stepping |= any(optimizer is each for each in self._optimizers)

    def _accumulated(self, parameter: Tensor) -> None:
        if self._stepping or self._stepped():
            self.close()
            return
        if self._watched is None:
            self._watched = parameter
        if parameter is not self._watched:
            return
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # nothing can be read while a CUDA graph is recorded
        before, self._seen = self._seen, Seen.of(parameter)
        self._changes += before is not None and self._seen.is_changed(before)
        if self._changes == CHANGES:
            self.close()
            warnings.warn(self._told, stacklevel=level_of_the_script())

    def close(self) -> None:
        """Remove all hooks."""
        self._watched = self._seen = None
        while self._handles:
            self._handles.pop().remove()


def never_stepped(system: str, *, pairs: int = 1, over: bool) -> str:
    """Return the text for a loop that updates weights by hand, where this exchanges nothing.

    Args:
        system: The call that makes the strategy.
        over: Whether the loop has ended.
    """
    called = "was called" if over else "is called, and weights change,"
    trains = "has trained" if over else "trains"
    with_one_pair = (
        ", or use push_pull() or allreduce(), where .grad is the mean gradient when backward() "
        "returns, and the loop may use it as it likes"
    )
    return (
        f"backward() {called} without optimizer.step(), and with {system} nothing is "
        f"exchanged before that: every worker {trains} on its own; let the optimizer that "
        f"job.distribute has returned make the steps{with_one_pair if pairs == 1 else ''}"
    )
