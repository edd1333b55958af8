"""slipstream itself, in the two lines that anyone writes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import slipstream
from slipstream.bench.contestants.session import Session


def train(strategy: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
    with slipstream.init() as job:
        model, optimizer = job.distribute(model, optimizer, strategy)
        yield Session(model, optimizer, job.wait, job.stats)
