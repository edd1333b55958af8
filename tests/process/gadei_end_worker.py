"""Learners that make different numbers of steps, and what each has at the end: FOLDER STEPS.

Before the first step the loop replaces the parameters' memory, as SAM and others do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from cases import digest
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import slipstream


def main(folder: str, steps: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with slipstream.init() as job:
        model, optimizer = job.distribute(model, optimizer)
        begun = torch.linspace(-0.5, 0.5, parameters_to_vector(model.parameters()).numel())
        vector_to_parameters(begun.clone(), model.parameters())
        generator = torch.Generator().manual_seed(job.rank)
        for _ in range(int(steps) if job.rank else 3):
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=generator)).square().sum().backward()
            optimizer.step()
    moved = parameters_to_vector(model.parameters()).detach() - begun
    told = {"digest": digest(model), "moved": float(moved.abs().max()), "summary": job.summary}
    Path(folder, f"{job.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
