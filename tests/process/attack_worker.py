"""Trains at a steady pace, and from some step on only if a file says so."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import slipstream

HOLD = len(sys.argv) > 1  # wait at a step until the attack is over
STEPS, HOLD_STEP, PAUSE_S = 120, 80, 0.05
WIDTH = 300

with slipstream.init() as job:
    if job.rank == 0:
        run = job._session.membership.run  # what a member knows
        known = {"key": run.credentials.key.hex(), "processes": run.processes}
        Path("run.json").write_text(json.dumps(known))
        Path("port").write_text(os.environ["MASTER_PORT"])
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = job.distribute(model, optimizer, "push_pull(chunk_bytes=65536)")
    data = torch.Generator().manual_seed(job.rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(
            model(torch.randn(4, WIDTH, generator=data)), torch.randn(4, 10, generator=data)
        )
        loss.backward()
        optimizer.step()
        if step == 5:
            Path(f"training.{job.rank}").touch()
        if HOLD:
            time.sleep(PAUSE_S)
            while job.rank == 0 and step == HOLD_STEP and not Path("go").exists():
                time.sleep(0.02)
if job.rank == 0:
    assert job.summary is not None
    print(job.summary["weights_sha256"], job.summary["faults"]["refused_frames"])
