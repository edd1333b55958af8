"""Writes a checkpoint in the middle of a small run, or goes on from one; says what it has then."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from cases import digest
from torch import nn

import slipstream

HALF, BATCH, INPUTS, HIDDEN, OUTPUTS = 3, 8, 24, 48, 16


def main(checkpoint: str, doing: str, told_to: str) -> None:
    torch.manual_seed(2)
    model: nn.Module = nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS)
    )
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with slipstream.init(start_limit_s=30, wait_limit_s=60) as job:
        model, optimizer = job.distribute(model, optimizer)
        if doing == "read":
            job.load(checkpoint)
        told = {"step": job.step, "loaded": digest(model)}
        job.broadcast(
            None
        )  # a barrier: the updates of others come into the weights as they are made
        for step in job.steps(job.step + HALF):
            samples = torch.Generator().manual_seed(1000 * job.rank + step)
            inputs = torch.randn(BATCH, INPUTS, generator=samples)
            optimizer.zero_grad()
            F.mse_loss(model(inputs), inputs[:, :OUTPUTS].sin()).backward()
            optimizer.step()
        if doing == "write":
            job.save(checkpoint)
        job.flush()
        told["after"] = digest(model)
    if job.rank == 0:
        Path(told_to).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
