"""Systems without one of their parts, to show its effect; not for users."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from slipstream.apps.bench.contestants import ours
from slipstream.apps.bench.contestants.session import Session
from slipstream.codecs.partition import PeerAccumulators
from slipstream.codecs.residual import Floats
from slipstream.runtime.gossip import slice_sender


class LastOnly(PeerAccumulators):
    """Accumulators that keep only the last update: unsent parts of earlier updates are lost."""

    def add(self, update: Floats) -> None:
        for accumulator in self.accumulators:
            accumulator.residual.values[:] = update
            accumulator.fresh = True


def without_accumulation(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
    """Train with Ako whose partitions contain one step's update only."""
    setattr(slice_sender, "PeerAccumulators", LastOnly)  # noqa: B010
    try:
        yield from ours.train("ako()", model, optimizer)
    finally:
        setattr(slice_sender, "PeerAccumulators", PeerAccumulators)  # noqa: B010
