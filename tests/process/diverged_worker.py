"""Saves a checkpoint with NaN in it, or loads one: save|load FOLDER STRATEGY."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream
from slipstream.errors import CheckpointError

WHAT, FOLDER, STRATEGY = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

start_servers_by_fork()
torch.manual_seed(0)
with slipstream.init(wait_limit_s=120) as job:
    model = nn.Linear(4, 3)
    if WHAT == "save":
        with torch.no_grad():
            model.weight[1, 2] = float("nan")
    begun = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = job.distribute(model, optimizer, STRATEGY)
    if WHAT == "save":
        job.save(FOLDER / "file")
    else:
        try:
            job.load(FOLDER / "file")
        except CheckpointError as error:
            print("refused:", error, flush=True)
        job.wait()
        print("kept" if torch.equal(model.weight, begun) else "changed", flush=True)
        job.load(FOLDER / "file", nonfinite="pass")
        job.wait()
        print("taken" if model.weight.isnan().any() else "not taken", flush=True)
