"""slipstream itself, with the usual two lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

import slipstream
from slipstream.apps.bench.contestants.session import Session


def train(strategy: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
    with slipstream.init() as job:
        model, optimizer = job.distribute(model, optimizer, strategy)
        judged = nullcontext if job.plan.local_steps is None else job.outer_weights
        steps = partial(rounds, job)
        yield Session(model, optimizer, job.wait, job.stats, steps=steps, weights=judged)


def rounds(job: slipstream.Job, steps: int) -> Iterator[int]:
    """Return the rounds; if each gradient is its own update, n of them count as one round."""
    updates = job.world_size if job.plan.consistency.alone else 1
    first = job.step
    for step in job.steps(first + steps * updates):
        yield (step - first) // updates + 1
