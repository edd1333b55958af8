"""Checks an optimizer's state against a model, before it is used.

It is a checkpoint's, or the user's, and may be of another model. Each check raises ValueError with
the mismatch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from slipstream.runtime.files.checkpoint_format import MOST_STEPS, OptimizerState
from slipstream.torch.checkpoints.checkpoint import check_layout
from slipstream.torch.optimizers.loop_optimizer import kind_of
from slipstream.torch.optimizers.shard_optimizer import is_elementwise, plain, restored

Optimizer = torch.optim.Optimizer
# Settings of how torch computes an update; they do not change the update.
MEANS = ("foreach", "fused", "capturable", "differentiable")
SAMPLE = (2,)


def check_state(saved: OptimizerState, model: nn.Module, optimizer: Optimizer) -> None:
    parameters = dict(model.named_parameters())
    for name in saved.state:
        if name not in parameters:
            raise ValueError(f"it has optimizer state of {name!r}, which the model has not")
    if is_elementwise(kind_of(optimizer)):
        check_elementwise_state(saved, parameters, optimizer)
    else:
        check_other_state(saved, parameters, optimizer)


def check_elementwise_state(
    saved: OptimizerState, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
) -> None:
    """Compare with a sample: one step on a small parameter shows what torch keeps for each."""
    kind = kind_of(optimizer)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for number, (group, changed) in enumerate(
        zip(optimizer.param_groups, saved.groups, strict=True)
    ):
        settings = {**group, **changed}
        samples = {torch.float32: sample_state(kind, settings, torch.float32, number)}
        for parameter in (p for p in group["params"] if id(p) in names):
            name, dtype = names[id(parameter)], parameter.dtype
            if entries := saved.state.get(name):
                if dtype not in samples:
                    samples[dtype] = sample_state(kind, settings, dtype, number)
                check_entries(name, entries, parameter, samples[dtype])
            elif parameter.requires_grad and keeps_from_start(kind):
                raise ValueError(f"it has no optimizer state of {name!r}")


def sample_state(
    kind: type[Optimizer], settings: Mapping[str, Any], dtype: torch.dtype, group: int
) -> dict[str, Any]:
    """The state that an optimizer with these settings keeps for a parameter with two elements."""
    taken = inspect.signature(kind).parameters
    try:
        arguments = {
            key: restored(plain(value))
            for key, value in settings.items()
            if key in taken and key not in (*MEANS, "params")
        }
        parameter = nn.Parameter(torch.zeros(SAMPLE, dtype=dtype))
        parameter.grad = torch.zeros_like(parameter)
        sample = make(kind, parameter, **arguments)
        sample.step()
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(
            f"{kind.__name__} refuses the settings of parameter group {group}: {error}"
        ) from error
    return dict(sample.state[parameter])


def keeps_from_start(kind: type[Optimizer]) -> bool:
    """Whether it creates its state in its constructor; such an optimizer does not do so later."""
    return bool(make(kind, nn.Parameter(torch.zeros(SAMPLE))).state)


def make(kind: Callable[..., Optimizer], parameter: nn.Parameter, **settings: Any) -> Optimizer:
    return kind([parameter], **settings)


def check_entries(
    name: str, entries: Mapping[str, Any], parameter: torch.Tensor, sample: Mapping[str, Any]
) -> None:
    for key, kept in sample.items():
        if isinstance(kept, torch.Tensor) and key not in entries:
            raise ValueError(f"{name!r} has optimizer state, but no {key!r}")
    for key, value in entries.items():
        what, kept = f"{key!r} of {name!r}", sample.get(key)
        if isinstance(kept, torch.Tensor) and kept.shape != SAMPLE:
            check_counter(what, value)
        elif isinstance(value, torch.Tensor):
            check_layout(what, value, parameter.shape, (parameter if kept is None else kept).dtype)
        elif value is not None:
            raise ValueError(f"{what} is {value!r:.80}, not a tensor")


def check_counter(what: str, value: Any) -> None:
    """A number for a whole parameter, such as its number of steps."""
    if not is_number(value) or not 0 <= float(value) <= MOST_STEPS:  # false for NaN
        raise ValueError(f"{what} is {value!r:.80}, not a finite number of at least 0")


def check_other_state(
    saved: OptimizerState, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
) -> None:
    """For an optimizer that may keep anything, compare only state that it already has."""
    for name, entries in saved.state.items():
        here = optimizer.state.get(parameters[name], {})
        for key, value in entries.items():
            what, kept = f"{key!r} of {name!r}", here.get(key)
            if key == "step" and is_number(value):
                check_counter(what, value)
            elif isinstance(kept, torch.Tensor) and isinstance(value, torch.Tensor):
                check_layout(what, value, kept.shape, kept.dtype)


def is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)
