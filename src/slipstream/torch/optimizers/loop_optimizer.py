"""The optimizer that the loop and schedulers see, where ``step`` does more than the user's."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from slipstream.errors import RuntimeFault
from slipstream.torch.optimizers.own_step import STATE_HOOKS, STEP_HOOKS

SAMPLE = 64  # values of a parameter
OF_SCALERS = ("found_inf", "grad_scale")  # attributes that a GradScaler sets for one step


def kind_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The type of the user's own optimizer, whichever one the loop uses."""
    return type(optimizer.local if isinstance(optimizer, LoopOptimizer) else optimizer)


class LoopOptimizer(torch.optim.Optimizer):
    """Stands for the user's: whatever it does not have itself is the user's own.

    A ``GradScaler`` sees gradients of this worker only, and may find an infinity where others find
    none. It calls ``step`` all the same, because of ``_step_supports_amp_scaling``, and gives it
    ``found_inf`` and ``grad_scale``. So a worker that skips a step makes it without gradients.

    Args:
        local: The user's own optimizer.
        still: Within this context, no other thread changes the weights.
    """

    local: torch.optim.Optimizer
    _step_supports_amp_scaling = True

    def __init__(
        self,
        local: torch.optim.Optimizer,
        still: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        # Not by super(): groups, state and settings are the user's.
        vars(self)["local"] = local
        vars(self).update({name: OrderedDict() for name in STEP_HOOKS})
        vars(self).update({name: getattr(local, name) for name in STATE_HOOKS})
        self._still = still
        self._computed: ComputedLoss | None = None
        self._on_step: Callable[[], None] = lambda: None

    def attach(self, on_step: Callable[[], None]) -> None:
        """Call this at every ``step`` from now on."""
        self._on_step = on_step

    # ---- what is the user's own

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.local.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.local.param_groups = groups

    @property
    def state(self) -> Any:
        return self.local.state

    @state.setter
    def state(self, state: Any) -> None:
        self.local.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.local.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.local.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "local":  # an object that is being copied has none yet
            raise AttributeError(name)
        found = getattr(self.local, name)
        is_method = getattr(found, "__self__", None) is self.local
        return partial(self._call, found) if is_method else found

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in vars(self) or name in OF_SCALERS or hasattr(type(self), name)
        if own or not hasattr(self.local, name):
            super().__setattr__(name, value)
        else:
            setattr(self.local, name, value)

    def _call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a method of the user's optimizer that torch's do not have.

        Raises:
            RuntimeFault: It has changed weights, of which no other worker knows.
        """
        trained = [p for group in self.param_groups for p in group["params"]]
        with self._still():
            before = [appearance(parameter) for parameter in trained]
            result = method(*arguments, **named)
            changed = [
                parameter
                for parameter, seen in zip(trained, before, strict=True)
                if appearance(parameter) != seen
            ]
        if changed:
            call = f"{type(self.local).__name__}.{method.__name__}()"
            raise RuntimeFault(
                f"{call} has changed weights (first a parameter of shape "
                f"{tuple(changed[0].shape)}), but with this strategy other workers only get what "
                "optimizer.step() changes: leave the call out, or use push_pull() or allreduce(), "
                "where your own optimizer runs on the mean gradient"
            )
        return result

    def __repr__(self) -> str:
        return repr(self.local)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies, also pickled ones, are of the user's optimizer."""
        return itself, (copy.copy(self.local),)

    def state_dict(self) -> dict[str, Any]:
        return self.local.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.local.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if set_to_none:
            self.local.zero_grad()  # as the user's own has no argument, maybe
        else:
            self.local.zero_grad(set_to_none=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.local.add_param_group(param_group)

    # ---- steps

    @property
    def has_pre_hooks(self) -> bool:
        """Whether anything runs before a step, on this worker's gradients."""
        return bool(self._optimizer_step_pre_hooks)

    @property
    def has_post_hooks(self) -> bool:
        """Whether anything runs after a step, on new weights."""
        return bool(self._optimizer_step_post_hooks)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            return self._make_step(closure)
        self._unscale()  # before hooks, which see gradients as in a job of one process
        return self._make_step()

    setattr(step, "hooked", True)  # noqa: B010

    def step_local(self) -> None:
        """Let the user's optimizer step on the gradients that there are.

        Raises:
            RuntimeFault: It runs the loop's closure in the midst of its step.
        """
        if self._computed is None or type(self.local).__module__.startswith("torch.optim"):
            self.local.step()
        else:
            self.local.step(self._computed.begin())

    @torch.optim.Optimizer.profile_hook_step
    def _make_step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._computed = None if closure is None else ComputedLoss(self.local, loss)
        self._on_step()
        # A scheduler made before job.distribute watches the local one.
        setattr(self.local, "_opt_called", True)  # noqa: B010
        return loss

    @torch.no_grad()
    def _unscale(self) -> None:
        """Do what a ``GradScaler`` leaves to the optimizer; no gradient counts if one is
        infinite."""
        # The scaler sets both for this step only; no scale: the loop has unscaled them itself.
        found, scale = (vars(self).get(name) for name in OF_SCALERS)
        if found is None:
            return
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if float(found):
            for parameter in trained:
                parameter.grad = None
        elif scale is not None:
            for parameter in trained:
                parameter.grad.div_(scale.to(parameter.grad.device))


class ComputedLoss:
    """Stands for the loop's closure, which has run before the user's optimizer steps.

    Args:
        optimizer: The user's own, which may ask for the loss before it changes weights.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        self._kind, self._loss = type(optimizer).__name__, loss
        self._trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._asked = False
        self._versions: list[int] = []

    def begin(self) -> ComputedLoss:
        """A step begins."""
        self._asked, self._versions = False, [p._version for p in self._trained]
        return self

    def __call__(self) -> Any:
        """Return the loss.

        Raises:
            RuntimeFault: The optimizer wants gradients of other weights.
        """
        if self._asked or self._versions != [p._version for p in self._trained]:
            raise RuntimeFault(
                f"{self._kind}.step() runs the loop's closure on weights that it has changed, but "
                "with this strategy backward ends before the step: call step() without a closure "
                "and make all passes before it, or use push_pull() or allreduce(), where your own "
                "optimizer runs on the mean gradient"
            )
        self._asked = True
        return self._loss


def itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What a copy of a ``LoopOptimizer`` is made by."""
    return optimizer


def appearance(parameter: torch.Tensor) -> tuple[int, int, bytes]:
    """Of a parameter: its version, where it is, and some of its values."""
    flat = parameter.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLE)].cpu().contiguous()
    values = sample.view(torch.uint8).numpy().tobytes()
    return parameter._version, parameter.data_ptr(), values


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the user's own optimizer, also if the loop has another one for it."""
    return optimizer.local if isinstance(optimizer, LoopOptimizer) else optimizer
