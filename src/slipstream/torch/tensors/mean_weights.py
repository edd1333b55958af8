"""The result of ``job.consensus``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from slipstream.torch.tensors.inventory import floating_state


@dataclass(frozen=True, slots=True)
class MeanWeights:
    """``weights``: the mean of all workers', by name. ``spread``: the root mean square distance of
    workers' weights from it, relative to its length."""

    weights: dict[str, torch.Tensor]
    spread: float


def by_name_of(model: nn.Module, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors from which ``whole_vector`` made this vector."""
    named, at = {}, 0
    for name, tensor in floating_state(model):
        part = vector[at : at + tensor.numel()]
        named[name] = part.view(tensor.shape).to(tensor.dtype)
        at += tensor.numel()
    return named
