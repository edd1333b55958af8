"""Checks a checkpoint against a job, before ``job.load`` changes anything.

The file may be damaged, hostile, or of another model. Each check raises ValueError with the
mismatch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slipstream.runtime.files.checkpoint_format import (
    OptimizerState,
    check_names,
    optimizer_in,
    pairs_in,
    sections_in,
)
from slipstream.torch.checkpoints.checkpoint import check_layout, check_model
from slipstream.torch.checkpoints.saved_outer_state import SHORT, check_outer_states
from slipstream.torch.checkpoints.state_fitting import MEANS, check_state, is_number
from slipstream.torch.optimizers.loop_optimizer import kind_of
from slipstream.torch.tensors.inventory import whole_state
from slipstream.torch.tensors.pairs import Pair, first_with
from slipstream.torch.tensors.random_state import Generators
from slipstream.torch.tensors.staging import as_real

Optimizer = torch.optim.Optimizer
Tensors = Mapping[str, torch.Tensor]
AVERAGED, PRECISE, RESIDUAL = "averaged/", "precise/", "residual/"
RATES = ("lr", "initial_lr", "max_lr", "min_lr")


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
    check_outer_states(tensors, model)
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
    if key == "capturable" and value and any(p.device.type == "cpu" for p in group["params"]):
        raise ValueError(f"{what} is on, which parameters on the CPU cannot have")
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


# ---- other tensors


def named_under(prefix: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors in a checkpoint under a prefix, by parameter's name."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def check_like_parameters(tensors: Tensors, model: nn.Module) -> None:
    """Averaged and outer weights have the shapes of the parameters."""
    parameters = dict(model.named_parameters())
    for prefix, what in ((AVERAGED, "average"), (PRECISE, "outer weight")):
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
