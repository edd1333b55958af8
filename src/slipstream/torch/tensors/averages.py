"""Averaged weights, kept next to a model's weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from slipstream.updates import Ema


class Averages:
    """θ̄ ← α θ̄ + (1 − α) θ after every update, of the parameters that have these names.

    Until the first update they are the weights, since the loop may still load others.
    """

    def __init__(self, model: nn.Module, average: Ema | None, names: Collection[str]) -> None:
        self._decay = 0.0 if average is None else average.decay
        named = model.named_parameters() if average is not None else ()
        self._trained = {name: parameter for name, parameter in named if name in names}
        self._averages: dict[str, torch.Tensor] = {}  # none before the first update

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The averages, by the parameter's name."""
        return self._averages or self._copies()

    def _copies(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._trained.items()}

    def begin(self) -> None:
        """Start anew from the weights that the next update finds."""
        self._averages = {}

    def before_update(self) -> None:
        """An update is about to change the weights."""
        self._averages = self.weights

    @torch.no_grad()
    def follow(self) -> None:
        """An update has changed the weights."""
        for name, average in self._averages.items():
            average.lerp_(self._trained[name], 1.0 - self._decay)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over saved averages; there may be more, of layers that are frozen in this job."""
        if known := self._trained.keys() & weights.keys():
            self._averages = self.weights
        for name in known:
            self._averages[name].copy_(weights[name])
