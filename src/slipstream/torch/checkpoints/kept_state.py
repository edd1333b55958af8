"""Where an optimizer's state and averaged weights are kept: in this process, or at servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from slipstream.runtime.files.checkpoint_format import OptimizerState
from slipstream.torch.tensors.averages import Averages
from slipstream.torch.tensors.inventory import placed

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Held:
    """The fetched state, by tensor name.

    Attributes:
        weights: Where servers hold them.
        outer: The outer optimizer's state, by entry's name, where there is one.
        precise: Outer weights in float32, of parameters that have fewer bits.
        state: The optimizer's, by entry's name.
        round: The round after which all of this was so, where servers agree on rounds.
    """

    weights: Tensors = field(default_factory=dict)
    averages: Tensors = field(default_factory=dict)
    outer: dict[str, Tensors] = field(default_factory=dict)
    precise: Tensors = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    round: int = 0


class KeptState(Protocol):
    """The optimizer's state and averaged weights of one pair, wherever they are."""

    def fetch(self) -> Held:
        """All of the state."""
        ...

    def restore(self, saved: OptimizerState, held: Held) -> None:
        """Take over what a checkpoint has, once its weights are in the model; every rank calls it.

        Args:
            held: Its averages and precise outer weights, of which others begin with the weights;
                its outer optimizer's state, without which others begin anew.
        """
        ...


class OwnState:
    """State of an optimizer that runs in this process; implements ``KeptState``."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, averages: Averages
    ) -> None:
        self._model, self._optimizer, self._averages = model, optimizer, averages

    def fetch(self) -> Held:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        state = {names[id(p)]: dict(entries) for p, entries in self._optimizer.state.items()}
        return Held(averages=self._averages.weights, state=state)

    def restore(self, saved: OptimizerState, held: Held) -> None:
        by_name = dict(self._model.named_parameters())
        self._optimizer.state.clear()
        for name, entries in saved.state.items():
            parameter = by_name[name]
            self._optimizer.state[parameter] = {
                key: placed(value, parameter) for key, value in entries.items()
            }
        self._averages.begin()
        self._averages.load(held.averages)
