"""A training script like any user's: it knows nothing of how it is started."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import slipstream

STEPS, BATCH = 20, 12
WIDTH = 512

with slipstream.init() as job:
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = job.distribute(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    data = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        inputs, targets = torch.randn(2, BATCH, WIDTH, generator=data)
        mine = slice(job.rank, None, job.world_size)
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        scheduler.step()
        job.record(loss=loss, accuracy=0.25, samples=len(inputs[mine]))
        if step == STEPS // 2 and job.rank == 0:
            while "HOLD" in os.environ and not Path("go").exists():
                time.sleep(0.02)
        if step == 3 and job.rank == 1 and "EXIT_0" in os.environ:
            os._exit(0)
        if step == 3 and job.rank == 1 and os.environ.get("FAIL_ATTEMPT"):
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
            assert attempt != os.environ["FAIL_ATTEMPT"], "not this time"
    job.wait()
    if job.rank == 0:
        torch.save(model.state_dict(), "weights.pt")
