"""Trains a little and shares values, while somebody else reads and writes the store."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import slipstream

TAG, HOLD, HOLD_EARLY = sys.argv[1], "hold" in sys.argv[2:], "hold early" in sys.argv[2:]
SHARES = 30


def hold(until: str = "go") -> None:
    while not Path(until).exists():
        time.sleep(0.02)


if "few descriptors" in sys.argv[2:]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
if "hold rank 1" in sys.argv[2:] and os.environ["RANK"] == "1":
    hold("written")
if os.environ["RANK"] == "0":
    Path("port").write_text(os.environ["MASTER_PORT"])
with slipstream.init(start_limit_s=60, wait_limit_s=60) as job:
    Path(f"joined.{job.rank}").touch()
    if HOLD_EARLY:
        hold()
    torch.manual_seed(1)
    model: nn.Module = nn.Linear(8, 4)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = job.distribute(model, optimizer, "push_pull")
    shared = []
    for step in range(SHARES):
        optimizer.zero_grad()
        F.mse_loss(model(torch.ones(2, 8)), torch.zeros(2, 4)).backward()
        optimizer.step()
        if step == 2:
            Path(f"training.{job.rank}").touch()
            if HOLD and job.rank == 0:
                hold()
        shared.append(job.broadcast(f"{TAG} {step}" if job.rank == 0 else None))
    Path(f"shared.{job.rank}").write_text(json.dumps(shared))
