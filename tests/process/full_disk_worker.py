"""Trains, and records far more than a small disk holds."""

from __future__ import annotations

import torch
from torch import nn

import slipstream

STEPS = 120

with slipstream.init() as job:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = job.distribute(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).pow(2).sum()
        loss.backward()
        optimizer.step()
        job.record(loss=loss, samples=1)
print("trained", job.step, flush=True)
