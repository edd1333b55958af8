"""A worker under ``slipstream run`` that joins late, or fails before it has joined: CASE."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import slipstream

CASE = sys.argv[1]


def wait_for(name: str) -> None:
    while not Path(name).exists():
        time.sleep(0.02)


if CASE == "late" and os.environ["RANK"] == "1":
    wait_for("init.0")
with slipstream.init() as job:
    Path(f"init.{job.rank}").touch()
    model: nn.Module = nn.Linear(4, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swapped: Any = (optimizer, model)
    if CASE == "all swap" or (CASE == "one swaps" and job.rank == 1):
        job.distribute(*swapped)
    if CASE == "one fails" and job.rank == 1:
        wait_for("init.0")
        raise ZeroDivisionError("on purpose")
    if CASE == "share":
        Path(f"shared.{job.rank}").write_text(str(job.broadcast(17 + job.rank)))
    if CASE != "no distribute":
        model, optimizer = job.distribute(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
