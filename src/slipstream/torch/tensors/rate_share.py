"""How high an optimizer's learning rate is, relative to its highest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class RateShare:
    """The learning rate relative to the highest so far, which is at least the initial one.

    For an optimizer without a learning rate, or with one that it finds itself, always 1.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._highest = 0.0

    def __call__(self) -> float:
        groups = self._optimizer.param_groups
        now, began = (highest_of(groups, name) for name in ("lr", "initial_lr"))
        self._highest = max(self._highest, now, began)
        return now / self._highest if self._highest > 0 else 1.0


def highest_of(groups: Sequence[dict[str, Any]], name: str) -> float:
    numbers = int | float | torch.Tensor
    return max((float(g[name]) for g in groups if isinstance(g.get(name), numbers)), default=0.0)
