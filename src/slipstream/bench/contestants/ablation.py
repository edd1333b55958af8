"""Systems with a part taken out, to show what it is worth; no user has a use for them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from slipstream.bench.contestants import ours
from slipstream.bench.contestants.session import Session
from slipstream.codecs.partition import Floats, Owed
from slipstream.runtime import partial_exchange


class LastOnly(Owed):
    """Keeps no more than the last update: what was not sent of those before is lost."""

    def add(self, update: Floats) -> None:
        for debt in self.debts:
            debt.total[:] = update
            debt.fresh = True


def without_accumulation(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
    """Ako whose slices hold one step's update only."""
    setattr(partial_exchange, "Owed", LastOnly)  # noqa: B010
    try:
        yield from ours.train("ako()", model, optimizer)
    finally:
        setattr(partial_exchange, "Owed", Owed)  # noqa: B010
