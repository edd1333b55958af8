"""Notices steps of optimizers that ``job.distribute`` was not given, on parameters that it was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from slipstream.errors import RuntimeFault
from slipstream.methods import SharedMemoryUpdates
from slipstream.plan import Plan


class OtherSteps:
    """Ends such a step with an error that names a parameter and the way out.

    A wrapper may step a distributed optimizer, and a distributed wrapper may step its inner one:
    steps around or within a step of a distributed optimizer are its own affair.

    Args:
        exchanged: The parameters that the job trains, and their names.
        known: The distributed optimizers, the user's own and those that the loop uses.
        why: Why such a step is wrong here.
    """

    def __init__(
        self, exchanged: Iterable[tuple[str, torch.Tensor]], known: Iterable[Optimizer], why: str
    ) -> None:
        self._names = {id(parameter): name for name, parameter in exchanged}
        self._known = list(known)
        self._ids = {id(optimizer) for optimizer in self._known}
        self._why = why
        self._within = 0  # identity of the distributed optimizer that makes a step
        self._known_steps = 0
        # By optimizer: a parameter that it is about to change, and the known steps until then.
        self._begun: dict[int, tuple[str, int]] = {}
        self._handles = [
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._end),
        ]

    @torch.compiler.disable
    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        identity = id(optimizer)
        if identity in self._ids:
            self._known_steps += 1
            self._within = self._within or identity
        elif not self._within and (name := self._trained_by(optimizer)):
            self._begun[identity] = name, self._known_steps

    def _trained_by(self, optimizer: Optimizer) -> str:
        """The name of a parameter of the job for which this optimizer has a gradient."""
        held = (p for group in optimizer.param_groups for p in group["params"])
        names = (self._names[id(p)] for p in held if p.grad is not None and id(p) in self._names)
        return next(names, "")

    @torch.compiler.disable
    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        identity = id(optimizer)
        if identity == self._within:
            self._within = 0
        name, known_steps = self._begun.pop(identity, ("", -1))
        if known_steps == self._known_steps:
            raise RuntimeFault(
                f"{type(optimizer).__name__} has made a step on {name!r}, but job.distribute was "
                f"not given it: {self._why}. Give all pairs of model and optimizer to "
                "job.distribute before the first step, and in a later phase change the settings "
                "of the optimizer there is: its param_groups, and requires_grad_(False) for what "
                "is frozen"
            )

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()


def why_not_by_others(plan: Plan, system: str, *, pairs: int) -> str:
    """Why a step of an optimizer that was not distributed is wrong; empty if it is right.

    With one pair whose mean gradients are in ``.grad`` after ``backward()``, any optimizer that
    uses them makes the same step on all workers.

    Args:
        system: The strategy, as messages name it.
    """
    update = plan.update
    local = update.inner.travels != "gradients" or plan.partial_exchange is not None
    in_memory = isinstance(plan.strategy.method, SharedMemoryUpdates)
    if update.holder_applies or local or plan.runs_ahead or in_memory:
        return f"with {system} only steps of an optimizer that it was given reach other workers"
    if pairs > 1:
        return (
            f"with {pairs} pairs gradients are averaged at the step() of the optimizer that they "
            "belong to"
        )
    if update.average is not None:
        return "averaged weights follow only steps of an optimizer that it was given"
    return ""
