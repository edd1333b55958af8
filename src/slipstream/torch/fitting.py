"""Checks a checkpoint against a job, before ``job.load`` changes anything.

The file may be damaged, hostile, or of another model. Each check raises ValueError with the
mismatch.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slipstream.runtime.files.checkpoint_format import (
    MOST_STEPS,
    OptimizerState,
    check_names,
    optimizer_in,
    pairs_in,
    sections_in,
)
from slipstream.torch.checkpoint import check_layout, check_model
from slipstream.torch.inventory import whole_state
from slipstream.torch.loop_optimizer import kind_of
from slipstream.torch.preparing import Pair, first_with
from slipstream.torch.random_state import Generators
from slipstream.torch.shard_optimizer import is_elementwise, plain, restored
from slipstream.torch.staging import as_real

Optimizer = torch.optim.Optimizer
Tensors = Mapping[str, torch.Tensor]
AVERAGED, OUTER, PRECISE, RESIDUAL = "averaged/", "outer/", "precise/", "residual/"
SHORT = (torch.float16, torch.bfloat16)  # of which outer weights and momenta are kept in float32
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
# Settings of how torch computes an update; they do not change the update.
MEANS = ("foreach", "fused", "capturable", "differentiable")
SAMPLE = (2,)


def check_pairs(tensors: Tensors, facts: Mapping[str, Any], pairs: Sequence[Pair]) -> None:
    """Check that all of a checkpoint can be loaded into the pairs of this job.

    Raises:
        ValueError: Something does not match; it names the pair if there are several.
    """
    there, here = pairs_in(facts), len(pairs)
    if there != here:
        raise ValueError(f"it holds {counted(there)}, and this job trains {counted(here)}")
    for number, (about, own) in enumerate(sections_in(facts, tensors)):
        holds_model = first_with(pairs, number) == number
        try:
            check_all(own, about, *pairs[number], holds_model=holds_model)
        except ValueError as error:
            raise ValueError(f"pair {number}: {error}" if here > 1 else str(error)) from error


def counted(pairs: int) -> str:
    return f"{pairs} pairs of model and optimizer" if pairs > 1 else "one model and optimizer"


def check_all(
    tensors: Tensors,
    facts: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    holds_model: bool = True,
) -> None:
    """Check that all of a pair's section can be loaded into it.

    Args:
        holds_model: The section has the model's tensors; else an earlier pair's section has them.

    Raises:
        ValueError: Something does not match.
    """
    check_names(tensors)
    if holds_model:
        check_model(model, tensors)
    elif any(name.startswith("model/") for name in tensors):
        raise ValueError("it holds the model of an earlier pair once more")
    saved = optimizer_in(facts, tensors)
    check_kind(saved, optimizer)
    for number, (group, settings) in enumerate(
        zip(optimizer.param_groups, saved.groups, strict=True)
    ):
        for key, value in settings.items():
            check_setting(f"{key!r} of parameter group {number}", key, value, group)
    check_state(saved, model, optimizer)
    check_like_parameters(tensors, model)
    check_residuals(tensors, model)
    for state in filter(None, facts["random"]):
        Generators.of(state)


def check_kind(saved: OptimizerState, optimizer: Optimizer) -> None:
    here = kind_of(optimizer).__name__
    if saved.kind != here or len(saved.groups) != len(optimizer.param_groups):
        raise ValueError(
            f"it holds the state of {saved.kind} with {len(saved.groups)} parameter group(s); "
            f"this job trains with {here} and {len(optimizer.param_groups)}"
        )


# ---- settings of parameter groups


def check_setting(what: str, key: str, value: Any, group: Mapping[str, Any]) -> None:
    """A setting must be finite, of the same type as now, and never the parameters themselves."""
    here = group.get(key)
    if key == "params":
        raise ValueError(f"{what} would replace the parameters of this job")
    if not all(map(math.isfinite, numbers_in(value))) and all(map(math.isfinite, numbers_in(here))):
        raise ValueError(f"{what} is {value!r:.80}, which is not finite")
    if key in RATES and any(number < 0 for number in numbers_in(value)):
        raise ValueError(f"{what} is {value!r:.80}, which is negative")
    if key in MEANS and not isinstance(value, bool | None):
        raise ValueError(f"{what} is {value!r:.80}, neither on nor off")
    if not same_kind(value, here):
        raise ValueError(f"{what} is {value!r:.80} there, {here!r:.80} in this job")


def same_kind(value: Any, here: Any) -> bool:
    """Whether a setting may replace another; None stands for a setting that is not used."""
    if is_number(here):
        return is_number(value)
    if here is None or value is None:
        return True
    if isinstance(here, tuple | list) and isinstance(value, tuple | list):
        pairs = zip(value, here, strict=False)
        return len(value) == len(here) and all(
            item is None or same_kind(item, each) for item, each in pairs
        )
    return type(value) is type(here)


def is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers_in(value: Any) -> Iterator[float]:
    """All numbers within, however deeply nested."""
    if isinstance(value, torch.Tensor):
        yield from as_real(value).reshape(-1).tolist()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from numbers_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from numbers_in(item)
    elif is_number(value):
        yield value


# ---- state by parameter


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
        for parameter in group["params"]:
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


# ---- other tensors


def named_under(prefix: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors in a checkpoint under a prefix, by parameter's name."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def check_like_parameters(tensors: Tensors, model: nn.Module) -> None:
    """Averaged and outer weights, and outer momenta, have the shapes of the parameters."""
    parameters = dict(model.named_parameters())
    kinds = ((AVERAGED, "average"), (OUTER, "outer momentum"), (PRECISE, "outer weight"))
    for prefix, what in kinds:
        for name, tensor in named_under(prefix, tensors).items():
            if name not in parameters:
                raise ValueError(f"it has an {what} of {name!r}, which the model has not")
            own = parameters[name]
            longer = prefix != AVERAGED and own.dtype in SHORT and tensor.dtype == torch.float32
            dtype = torch.float32 if longer else own.dtype
            check_layout(f"the {what} of {name!r}", tensor, own.shape, dtype)


def check_residuals(tensors: Tensors, model: nn.Module) -> None:
    """Residuals, by rank or of the servers, must have as many values as their tensor."""
    sizes = {name: as_real(tensor).numel() for name, tensor in whole_state(model)}
    for full, residual in tensors.items():
        if not full.startswith(RESIDUAL):
            continue
        whose, _, name = full.removeprefix(RESIDUAL).partition("/")
        if not re.fullmatch(r"servers|[0-9]{1,9}", whose) or name not in sizes:
            raise ValueError(f"it holds {full!r}, which belongs to no rank or tensor")
        if residual.dtype != torch.float32 or residual.shape != (sizes[name],):
            raise ValueError(
                f"{full!r} is {tuple(residual.shape)} {residual.dtype}, not "
                f"({sizes[name]},) torch.float32"
            )
