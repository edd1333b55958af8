"""Trains slowly and without end, until something goes wrong: here on purpose, or from outside."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import slipstream

STRATEGY, DEED = sys.argv[1], sys.argv[2]
CULPRIT = int(sys.argv[3]) if len(sys.argv) > 3 else -1
PAUSE_S = 0.1
DEED_STEP = 5
START_LIMIT_S = 5 if DEED in ("nobody comes", "hangs") else 60


def mark(name: str) -> None:
    file = Path(f"{name}.{os.environ['RANK']}")
    part = Path(f".{file}.part")
    part.write_text(str(os.getpid()))
    part.rename(file)


def all_marked(name: str, job: slipstream.Job) -> None:
    """Wait until every rank has left this mark: it would not come from ranks that have ended."""
    while not all(Path(f"{name}.{rank}").exists() for rank in range(job.world_size)):
        time.sleep(PAUSE_S)


def misbehave() -> None:
    if DEED.startswith("raise"):
        raise ValueError("no luck today")
    if DEED == "exit":
        sys.exit(3)


mark("started")
if DEED == "hangs" and os.environ["RANK"] == str(CULPRIT):
    while True:
        time.sleep(60)
if START_LIMIT_S < 60:
    # One rank is missed, and not another one that has just not started yet.
    present = int(os.environ["WORLD_SIZE"]) - (DEED == "nobody comes")
    while len(list(Path().glob("started.*"))) < present:
        time.sleep(0.01)
with slipstream.init(start_limit_s=START_LIMIT_S) as job:
    mark("joined")
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(20, 20)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if DEED == "lingers" and job.rank == CULPRIT:
        while True:
            time.sleep(60)
    model, optimizer = job.distribute(model, optimizer, STRATEGY)
    for step in range(DEED_STEP if DEED == "raise last" else 10_000):
        optimizer.zero_grad()
        model(torch.randn(4, 20)).pow(2).mean().backward()
        optimizer.step()
        if step == DEED_STEP:
            mark("training")
            if job.rank == CULPRIT:
                all_marked("training", job)
                misbehave()
        time.sleep(PAUSE_S)
    mark("finished")
    if job.rank == CULPRIT:
        all_marked("finished", job)
        misbehave()
