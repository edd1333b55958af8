"""The ``step`` of the user's own optimizer: does calling it run torch's hooks, and is it replaced?

Torch hooks ``step`` in ``Optimizer.__init__``. Wrappers of optimizers often do without it, and a
loop may put another function in the place of an optimizer's ``step``.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from slipstream.errors import ConfigError

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def check_whole(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a wrapper that has not what every optimizer has.

    Raises:
        ConfigError: It has no parameter groups, or no state.
    """
    missing = [name for name in ("param_groups", "state") if not hasattr(optimizer, name)]
    if missing:
        kind = type(optimizer).__name__
        raise ConfigError(
            f"{kind} has no {' and no '.join(missing)}: let its __init__ call "
            "super().__init__(params, defaults), or take over those of the optimizer that it "
            f"wraps; or distribute that optimizer, and give {kind} the one that job.distribute "
            "returns"
        )


def run_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Let calls of this optimizer's ``step`` run its hooks, each once.

    That is so after ``Optimizer.__init__``. Else the hooks run around the step that the instance
    has; hooks of another optimizer that is stepped within are its own.
    """
    for name in (*STEP_HOOKS, *STATE_HOOKS):
        if not hasattr(optimizer, name):
            setattr(optimizer, name, OrderedDict())
    if not hasattr(optimizer, "defaults"):
        optimizer.defaults = {}
    step = optimizer.step
    if getattr(step, "hooked", False):
        return
    hooked = torch.optim.Optimizer.profile_hook_step(without_hooks(step))
    setattr(hooked, "hooked", True)  # noqa: B010
    # Bound, as schedulers expect it.
    vars(optimizer)["step"] = types.MethodType(hooked, optimizer)


def without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same as a function of the optimizer; a step that it calls in turn runs no hooks."""

    @functools.wraps(step)
    def run(optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        hooks = [getattr(optimizer, name) for name in STEP_HOOKS]
        for name in STEP_HOOKS:
            setattr(optimizer, name, OrderedDict())
        try:
            return step(*arguments, **named)
        finally:
            for name, before in zip(STEP_HOOKS, hooks, strict=True):
                setattr(optimizer, name, before)

    return run


def is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` is another function than its type's; torch's schedulers wrap that one."""
    step = vars(optimizer).get("step")
    if step is None:
        return False
    if hasattr(step, "_wrapped_by_lr_sched"):
        step = step.__wrapped__
    return getattr(step, "__func__", step) is not type(optimizer).step


def check_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a replaced ``step`` where another process makes the steps, which does not know it.

    Raises:
        ConfigError: It is replaced.
    """
    if is_replaced(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__}.step was replaced by another function, but with this "
            "strategy another process makes the steps, and would not call it: do what it does in "
            "the loop or in hooks (optimizer.register_step_pre_hook, register_step_post_hook), or "
            "use push_pull(), in which workers update"
        )
