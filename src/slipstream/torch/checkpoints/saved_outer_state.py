"""An outer optimizer's state in a checkpoint: names of tensors, and their checks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from slipstream.outer_optimizers.nesterov import MOMENTUM
from slipstream.outer_optimizers.outer_optimizer import STEP
from slipstream.torch.checkpoints.checkpoint import check_layout

# Momentum is under "outer/", where the first checkpoints had it; other entries under their names.
OUTER, OUTER_STATE = "outer/", "outer state/"
SHORT = (torch.float16, torch.bfloat16)  # of which outer weights and state are kept in float32
Entries = dict[str, torch.Tensor]


def outer_tensors(states: Mapping[str, Entries]) -> dict[str, torch.Tensor]:
    """States by the parameter's name, as a checkpoint names their tensors."""
    return {
        f"{prefix_of(entry)}{name}": tensor
        for name, entries in states.items()
        for entry, tensor in entries.items()
    }


def prefix_of(entry: str) -> str:
    return OUTER if entry == MOMENTUM else f"{OUTER_STATE}{entry}/"


def outer_states(tensors: Mapping[str, torch.Tensor]) -> dict[str, Entries]:
    """States by the parameter's name, from a checkpoint's tensors."""
    found: dict[str, Entries] = {}
    for full, tensor in tensors.items():
        if full.startswith(OUTER):
            entry, name = MOMENTUM, full.removeprefix(OUTER)
        elif full.startswith(OUTER_STATE):
            entry, _, name = full.removeprefix(OUTER_STATE).partition("/")
        else:
            continue
        found.setdefault(name, {})[entry] = tensor
    return found


def check_outer_states(states: Mapping[str, Entries], model: nn.Module) -> None:
    """An outer optimizer's state has the shapes of the parameters, or is a number of updates.

    Raises:
        ValueError: It has not, or the model has no such parameter.
    """
    parameters = dict(model.named_parameters())
    for name, entries in states.items():
        if name not in parameters:
            raise ValueError(
                f"it has an outer optimizer's state of {name!r}, which the model has not"
            )
        own = parameters[name]
        for entry, tensor in entries.items():
            what = f"the outer optimizer's {entry!r:.80} of {name!r}"
            if entry == STEP:
                check_layout(what, tensor, torch.Size(()), torch.float64)
                if not tensor >= 0:
                    raise ValueError(f"{what} is {tensor.item()}")
                continue
            longer = own.dtype in SHORT and tensor.dtype == torch.float32
            check_layout(what, tensor, own.shape, torch.float32 if longer else own.dtype)
