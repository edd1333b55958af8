"""Learners that make different numbers of steps, and what each has at the end: FOLDER STEPS."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import nn

import slipstream


def digest(model: nn.Module) -> str:
    state = b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())
    return hashlib.sha256(state).hexdigest()


def main(folder: str, steps: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with slipstream.init() as job:
        model, optimizer = job.distribute(model, optimizer)
        generator = torch.Generator().manual_seed(job.rank)
        for _ in range(int(steps) if job.rank else 3):
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=generator)).square().sum().backward()
            optimizer.step()
    told = {"digest": digest(model), "summary": job.summary}
    Path(folder, f"{job.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
