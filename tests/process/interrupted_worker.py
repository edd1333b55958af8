"""Trains until it is interrupted, and then saves its weights, as scripts do: CASE STRATEGY.

``within``: the handler is within the job's ``with`` block; ``around``: around it; ``none``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import torch
from torch import nn

import slipstream

CASE, STRATEGY = sys.argv[1:3]
RANK = os.environ["RANK"]
model = nn.Linear(4, 1)


def train(job: slipstream.Job) -> None:
    net, optimizer = job.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), STRATEGY)
    while True:
        optimizer.zero_grad()
        net(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        Path(f"trains.{RANK}").touch()


@contextlib.contextmanager
def saving() -> object:  # type: ignore[misc]
    try:
        yield
    except KeyboardInterrupt:
        torch.save(model.state_dict(), f"saved.{RANK}.pt")
        print("saved by", RANK, flush=True)


if CASE == "around":
    with saving(), slipstream.init() as job:
        train(job)
else:
    with slipstream.init() as job, saving() if CASE == "within" else contextlib.nullcontext():
        train(job)
