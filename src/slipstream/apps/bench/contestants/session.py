"""The interface of a contestant to the timed loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def nothing() -> None:
    """Do nothing, for contestants that have nothing to wait for."""


def one_by_one(steps: int) -> range:
    """Return all rounds, for contestants in which every worker makes every round."""
    return range(1, steps + 1)


@dataclass(frozen=True, slots=True)
class Session:
    """A model and an optimizer that train together with the other workers'.

    ``steps(n)`` gives the numbers, from 1, of the rounds until n are done that this worker takes
    part in. ``finish`` returns when every weight is up to date; ``stats`` is what the contestant
    itself counted. ``inner`` is the user's own optimizer, where ``optimizer`` is one around it that
    waits for others. Within ``weights()`` the model has those to judge, where workers train on
    weights of their own.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None] = nothing
    stats: Callable[[], dict[str, Any]] = dict
    inner: torch.optim.Optimizer | None = None
    steps: Callable[[int], Iterable[int]] = one_by_one
    weights: Callable[[], AbstractContextManager[object]] = nullcontext


Train = Callable[[nn.Module, torch.optim.Optimizer], Iterator[Session]]
