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
    pairs_in,
    sections_in,
)
from slipstream.torch.checkpoints.checkpoint import Checkpoint, check_layout, check_model
from slipstream.torch.checkpoints.saved_outer_state import SHORT, check_outer_states
from slipstream.torch.checkpoints.state_fitting import MEANS, check_state, is_number
from slipstream.torch.checkpoints.training_state import (
    HOLDERS,
    MODEL,
    RESIDUAL,
    LocalState,
    OwnState,
    SharedState,
    TrainingState,
    named_under,
)
from slipstream.torch.optimizers.loop_optimizer import kind_of
from slipstream.torch.tensors.inventory import whole_state
from slipstream.torch.tensors.pairs import Pair, first_with
from slipstream.torch.tensors.random_state import Generators
from slipstream.torch.tensors.staging import as_real

Optimizer = torch.optim.Optimizer
Tensors = Mapping[str, torch.Tensor]
RATES = ("lr", "initial_lr", "max_lr", "min_lr")


def state_for(checkpoint: Checkpoint, pairs: Sequence[Pair]) -> TrainingState:
    """Check that all of a checkpoint can be loaded into the pairs of this job, and return it.

    Raises:
        ValueError: Something does not match; it names the pair if there are several.
    """
    there, here = pairs_in(checkpoint.facts), len(pairs)
    if there != here:
        raise ValueError(f"it holds {counted(there)}, and this job trains {counted(here)}")
    for number, (_, tensors) in enumerate(sections_in(checkpoint.facts, checkpoint.tensors)):
        try:
            check_names(tensors)
            check_held_model(tensors, pairs, number)
        except ValueError as error:
            raise ValueError(f"pair {number}: {error}" if here > 1 else str(error)) from error
    state = state_in(checkpoint)
    for number, (pair, shared) in enumerate(zip(pairs, state.shared, strict=True)):
        try:
            check_shared(shared, *pair)
            for own in state.own.values():
                for residuals in own.residuals[number : number + 1]:
                    check_residuals(residuals, pair.model)
        except ValueError as error:
            raise ValueError(f"pair {number}: {error}" if here > 1 else str(error)) from error
    for own in state.own.values():
        if own.random:
            Generators.of(own.random)
    return state


def state_in(checkpoint: Checkpoint) -> TrainingState:
    """Read a checkpoint; raises ValueError if parts of it have no meaning."""
    shared: list[SharedState] = []
    residuals: list[dict[str, dict[str, torch.Tensor]]] = []
    local: list[LocalState] = []
    packed = checkpoint.facts.get("local", [])
    for number, (facts, tensors) in enumerate(sections_in(checkpoint.facts, checkpoint.tensors)):
        try:
            shared.append(SharedState.of(facts, tensors))
            residuals.append(residuals_in(tensors))
            local += [LocalState.of(each, tensors) for each in packed[number : number + 1]]
        except ValueError as error:
            several = pairs_in(checkpoint.facts) > 1
            raise ValueError(f"pair {number}: {error}" if several else str(error)) from error
    random = {str(rank): state for rank, state in enumerate(checkpoint.facts["random"]) if state}
    members = {*random, *(member for each in residuals for member in each)}
    own: dict[int | str, OwnState] = {
        member if member == HOLDERS else int(member): OwnState(
            random.get(member, {}), [each.get(member, {}) for each in residuals]
        )
        for member in members
    }
    facts = {k: v for k, v in checkpoint.facts.items() if k not in ("optimizer", "random", "local")}
    return TrainingState(facts, shared, own, local)


def residuals_in(tensors: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    """By member and tensor's name; raises ValueError for a name of neither."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for full, residual in named_under(RESIDUAL, tensors).items():
        member, _, name = full.partition("/")
        if not re.fullmatch(rf"{HOLDERS}|0|[1-9][0-9]{{0,8}}", member):
            raise ValueError(f"it holds {RESIDUAL + full!r}, which belongs to no rank or tensor")
        found.setdefault(member, {})[name] = residual
    return found


def counted(pairs: int) -> str:
    return f"{pairs} pairs of model and optimizer" if pairs > 1 else "one model and optimizer"


def check_held_model(tensors: Tensors, pairs: Sequence[Pair], number: int) -> None:
    """Check a section's model, which it has unless an earlier pair has the same one.

    Raises:
        ValueError: It has not, or another model.
    """
    if first_with(pairs, number) == number:
        check_model(pairs[number].model, tensors)
    elif any(name.startswith(MODEL) for name in tensors):
        raise ValueError("it holds the model of an earlier pair once more")


def check_shared(shared: SharedState, model: nn.Module, optimizer: Optimizer) -> None:
    """Check that a pair's state can be loaded into it.

    Raises:
        ValueError: Something does not match.
    """
    check_kind(shared.optimizer, optimizer)
    for number, (group, settings) in enumerate(
        zip(optimizer.param_groups, shared.optimizer.groups, strict=True)
    ):
        for key, value in settings.items():
            check_setting(f"{key!r} of parameter group {number}", key, value, group)
    check_state(shared.optimizer, model, optimizer)
    check_like_parameters("average", shared.averages, model)
    check_like_parameters("outer weight", shared.precise, model, in_float32=True)
    check_outer_states(shared.outer, model)


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


def check_like_parameters(
    what: str, tensors: Tensors, model: nn.Module, *, in_float32: bool = False
) -> None:
    """Averaged and outer weights have the shapes of the parameters.

    Args:
        what: One of them, in errors.
        in_float32: Those of parameters in 16 bits may have 32.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if name not in parameters:
            raise ValueError(f"it has an {what} of {name!r}, which the model has not")
        own = parameters[name]
        longer = in_float32 and own.dtype in SHORT and tensor.dtype == torch.float32
        dtype = torch.float32 if longer else own.dtype
        check_layout(f"the {what} of {name!r}", tensor, own.shape, dtype)


def check_residuals(residuals: Tensors, model: nn.Module) -> None:
    """Residuals must have as many values as their tensor."""
    sizes = {name: as_real(tensor).numel() for name, tensor in whole_state(model)}
    for name, residual in residuals.items():
        if name not in sizes:
            raise ValueError(f"it holds a residual of {name!r}, which the model has not")
        if residual.dtype != torch.float32 or residual.shape != (sizes[name],):
            raise ValueError(
                f"the residual of {name!r} is {tuple(residual.shape)} {residual.dtype}, not "
                f"({sizes[name]},) torch.float32"
            )
