"""Where workers exchange slices: a worker's own step is done at once, and owed to all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.runtime.partial_exchange import PartialExchange
from slipstream.torch.synchronizer import Synchronizer


class PartialUpdates(Synchronizer):
    """What the user's optimizer does to the weights is what travels, so any optimizer will do: its
    momentum and the like are of this worker's gradients alone."""

    def __init__(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        super().__init__(*args)
        assert self.plan.slices is not None
        self._optimizer, self._slices = optimizer, self.plan.slices
        (self._exchange,) = (e for e in self._exchanges if isinstance(e, PartialExchange))

    def pass_ended(self) -> None:
        """Nothing leaves before the step."""

    def end_step(self) -> None:
        """Step, owe it to the others, and wait for them if they are far behind."""
        self.tap.end()
        self._check_all_exchanged(self._optimizer)
        self._clear_refused()
        self._exchange.let_in()
        coefficient = self._slices.coefficient(self.step, self._exchange.workers)
        self._exchange.give(self._exchange.weights.stepped(self._optimizer.step, coefficient))
        self._exchange.wait()
        self.after_step()

    def wait(self, tensors: Sequence[int] | None = None) -> None:
        """Weights are never complete while others train; ``job.flush`` makes them so."""
