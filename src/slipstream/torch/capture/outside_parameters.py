"""Notices parameters that train with a distributed model, but that the job does not know.

A criterion with weights, or a head beside the model, gets its gradient in the model's own backward
pass; with an optimizer of its own, each rank trains another one. A model that is trained apart from
the distributed ones, in passes of its own, may well be local.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from slipstream.torch.tensors.script_lines import level_of_the_script

WATCHED_STEPS = 5  # of an optimizer; then its parameters train apart
MOST_OPTIMIZERS = 16


class OutsideParameters:
    """Warns once of an optimizer that was not distributed and steps such a parameter.

    Hooks on parameters are there only for the first steps of such an optimizer.

    Args:
        exchanged: The parameters that the job trains.
        known: The distributed optimizers, the user's own and those that the loop uses.
        is_first: Whether this worker is the one that warns.
    """

    def __init__(
        self, exchanged: Iterable[Tensor], known: Iterable[Optimizer], *, is_first: bool
    ) -> None:
        self._exchanged = {id(parameter): parameter for parameter in exchanged}
        self._known = {id(optimizer): optimizer for optimizer in known}
        self._watched: dict[int, WatchedOptimizer] = {}
        self._passes = RecentPasses(self._exchanged.values())
        self._is_over = False  # this hook cannot be removed while it runs
        self._handles: list[Any] = []
        if is_first and self._exchanged:
            self._handles.append(register_optimizer_step_pre_hook(self._begin))

    @torch.compiler.disable
    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        identity = id(optimizer)
        if identity in self._known or self._is_over:
            return
        watched = self._watched.get(identity)
        if watched is None:
            if len(self._watched) < MOST_OPTIMIZERS and (found := self._outside(optimizer)):
                self._passes.begin()
                self._watched[identity] = WatchedOptimizer(optimizer, *found)
            return
        if not watched.steps_left:
            return
        watched.steps_left -= 1
        if watched.last_pass in self._passes.seen:
            self._stop()
            warnings.warn(watched.told, stacklevel=level_of_the_script())
        elif not watched.steps_left:
            watched.close()
            if not any(each.steps_left for each in self._watched.values()):
                self._passes.end()

    def _outside(self, optimizer: Optimizer) -> tuple[str, Tensor] | None:
        """A parameter that this optimizer is about to change, and that the job does not know."""
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                leaf = parameter.grad is not None and parameter.is_leaf and parameter.requires_grad
                if leaf and id(parameter) not in self._exchanged:
                    return f"group {number}, parameter {place}", parameter
        return None

    def close(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()
        self._stop()

    def _stop(self) -> None:
        self._is_over = True
        for watched in self._watched.values():
            watched.close()
        self._passes.end()


class WatchedOptimizer:
    """An optimizer that was not distributed, and the last backward pass of one of its parameters.

    Attributes:
        last_pass: The pass that gave the parameter its last gradient; -1 before the first.
        steps_left: For how many more steps it is watched.
    """

    def __init__(self, optimizer: Optimizer, place: str, parameter: Tensor) -> None:
        self._optimizer = optimizer  # its identity must stay its own
        self._place, self._shape = place, tuple(parameter.shape)
        self.last_pass, self.steps_left = -1, WATCHED_STEPS
        self._handle = parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, _: Tensor) -> None:
        self.last_pass = torch._C._current_graph_task_id()

    @property
    def told(self) -> str:
        """The warning."""
        return (
            f"{type(self._optimizer).__name__} trains parameters that job.distribute was not given "
            f"({self._place}, of shape {self._shape}), with gradients from the same backward pass "
            "as the distributed model's: they are not exchanged, so every rank trains its own. "
            "Give them to job.distribute, too: in one module with the model "
            "(nn.ModuleDict({'model': model, 'criterion': criterion})), or as a pair of their own "
            "(job.distribute([(model, optimizer), (criterion, second)]))"
        )

    def close(self) -> None:
        """Remove the hook."""
        self.steps_left = 0
        self._handle.remove()


class RecentPasses:
    """The latest backward passes that gave distributed parameters gradients, while it is asked."""

    MOST = 8  # several pairs, or passes of an accumulation, may come before a step

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self.seen: list[int] = []
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Watch the parameters."""
        if not self._handles:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(self._accumulated)
                for parameter in self._parameters
                if parameter.requires_grad
            ]

    def _accumulated(self, _: Tensor) -> None:
        this_pass = torch._C._current_graph_task_id()
        if this_pass not in self.seen:
            self.seen = [*self.seen, this_pass][-self.MOST :]

    def end(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()
        self.seen = []
