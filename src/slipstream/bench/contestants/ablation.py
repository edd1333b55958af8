"""Systems with a part taken out, to show what it is worth; no user has a use for them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from slipstream.bench.contestants import ours
from slipstream.bench.contestants.session import Session
from slipstream.codecs.partition import PeerAccumulators
from slipstream.codecs.residual import Floats
from slipstream.runtime.exchange import slice_sender


class LastOnly(PeerAccumulators):
    """Keeps no more than the last update: what was not sent of those before is lost."""

    def add(self, update: Floats) -> None:
        for accumulator in self.accumulators:
            accumulator.residual.values[:] = update
            accumulator.fresh = True


def without_accumulation(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
    """Ako whose slices hold one step's update only."""
    setattr(slice_sender, "PeerAccumulators", LastOnly)  # noqa: B010
    try:
        yield from ours.train("ako()", model, optimizer)
    finally:
        setattr(slice_sender, "PeerAccumulators", PeerAccumulators)  # noqa: B010
