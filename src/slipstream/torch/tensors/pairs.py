"""Pairs of a model and the optimizer that a loop steps for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn


class Pair(NamedTuple):
    """A model, and the optimizer that updates it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def distinct_models(pairs: Sequence[Pair]) -> list[nn.Module]:
    """Every model once: several optimizers may share one."""
    return list({id(pair.model): pair.model for pair in pairs}.values())


def first_with(pairs: Sequence[Pair], number: int) -> int:
    """The number of the first pair that has the same model."""
    return next(k for k, pair in enumerate(pairs) if pair.model is pairs[number].model)
