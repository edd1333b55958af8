"""What a contestant gives to the loop that is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def nothing() -> None:
    """For contestants that have nothing to wait for."""


@dataclass(frozen=True, slots=True)
class Session:
    """A model and an optimizer that train together with the other workers'.

    ``finish`` returns when every weight is up to date; ``stats`` is what the contestant itself
    counted. ``inner`` is the user's own optimizer, where ``optimizer`` is one around it that waits
    for others.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None] = nothing
    stats: Callable[[], dict[str, Any]] = dict
    inner: torch.optim.Optimizer | None = None
