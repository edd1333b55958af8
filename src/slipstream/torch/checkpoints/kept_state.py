"""Where an optimizer's state and averaged weights are kept: in this process, or at servers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from slipstream.torch.checkpoints.training_state import SharedState, optimizer_state
from slipstream.torch.tensors.averages import Averages
from slipstream.torch.tensors.inventory import placed


class KeptState(Protocol):
    """The optimizer's state and averaged weights of one pair, wherever they are."""

    def fetch(self) -> SharedState:
        """Return all of the state; of weights, those that are elsewhere than in the model."""
        ...

    def restore(self, saved: SharedState) -> None:
        """Take over a checkpoint's state, once its weights are in the model; every rank calls it.

        Averages and outer weights that it has not begin with the weights; an outer optimizer whose
        state it has not begins anew.
        """
        ...


class StateAtWorker:
    """State of an optimizer that runs in this process; implements ``KeptState``."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, averages: Averages
    ) -> None:
        self._model, self._optimizer, self._averages = model, optimizer, averages

    def fetch(self) -> SharedState:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        state = {names[id(p)]: dict(entries) for p, entries in self._optimizer.state.items()}
        optimizer = optimizer_state(self._optimizer, state)
        return SharedState(optimizer, averages=self._averages.weights)

    def restore(self, saved: SharedState) -> None:
        by_name = dict(self._model.named_parameters())
        self._optimizer.state.clear()
        for name, entries in saved.optimizer.state.items():
            parameter = by_name[name]
            self._optimizer.state[parameter] = {
                key: placed(value, parameter) for key, value in entries.items()
            }
        self._averages.begin()
        self._averages.load(saved.averages)
