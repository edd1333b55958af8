"""What each host runs in ``test_hosts``: a short job for each strategy, its figures as JSON."""

import json
import os
import sys
from typing import Any

import torch
from torch import nn

import slipstream


def train(strategy: str) -> dict[str, Any]:
    with slipstream.init() as job:
        if "HOLD" in os.environ:
            print("joined", flush=True)
            sys.stdin.readline()
        torch.manual_seed(job.rank)
        model = nn.Sequential(
            nn.Linear(64, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 10)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = job.distribute(model, optimizer, strategy)
        for step in range(10):
            generator = torch.Generator().manual_seed(1000 * step + job.rank)
            x = torch.randn(8, 64, generator=generator)
            y = torch.randint(10, (8,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return job.stats()


print(json.dumps({strategy: train(strategy) for strategy in sys.argv[1:]}))
