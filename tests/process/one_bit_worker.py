"""Learns what a fixed network does, and writes down the weights and the loss of every step."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from cases import digest
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream

STEPS, BATCH = 60, 32
INPUTS, HIDDEN, OUTPUTS = 24, 96, 16


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))


def main() -> None:
    torch.manual_seed(1)
    teacher = network()
    torch.manual_seed(2)
    model: nn.Module = network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    digests, losses, skipped = [], [], []
    with slipstream.init(start_limit_s=60, wait_limit_s=60, silence_limit_s=10) as job:
        if job.rank > 0:
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.add_(1)  # rank 0's weights are what counts
        model, optimizer = job.distribute(model, optimizer)
        samples = torch.Generator().manual_seed(100 + job.rank)
        for step in range(STEPS):
            inputs = torch.randn(BATCH, INPUTS, generator=samples)
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), teacher(inputs).detach())
            overflows = str(step) == os.environ.get("OVERFLOW") and job.rank == 1
            (loss * torch.inf if overflows else loss).backward()
            # As mixed precision does: a step that is not finite is not taken.
            if all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()):
                optimizer.step()
            else:
                skipped.append(step)
            losses.append(float(loss))
            digests.append(digest(model))
    told = {"digests": digests, "losses": losses, "skipped": skipped}
    Path(f"told.{job.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    start_servers_by_fork()
    main()
