"""Averaged weights: kept next to a model's weights, and put into a model for evaluation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


class Averages:
    """θ̄ ← α θ̄ + (1 − α) θ after every update, of the parameters that have these names."""

    def __init__(self, model: nn.Module, decay: float, names: Collection[str]) -> None:
        self._decay = decay
        self._trained = {n: p for n, p in model.named_parameters() if n in names}
        self.weights: dict[str, torch.Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Start the averages with the current weights."""
        self.weights = {name: p.detach().clone() for name, p in self._trained.items()}

    @torch.no_grad()
    def follow(self) -> None:
        for name, parameter in self._trained.items():
            self.weights[name].lerp_(parameter, 1.0 - self._decay)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over saved averages; there may be more, of layers that are frozen in this job."""
        for name in self.weights.keys() & weights.keys():
            self.weights[name].copy_(weights[name])


@contextmanager
def lent(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Within, the model has these weights."""
    own = {name: parameter.data for name, parameter in model.named_parameters() if name in weights}
    try:
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.data = weights[name].to(parameter)
        yield
    finally:
        for name, parameter in model.named_parameters():
            if name in own:
                parameter.data = own[name]
