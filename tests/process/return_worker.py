"""Trains with partial exchange; one rank is killed once and is started again."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from cases import digest
from torch import nn

import slipstream

LIFE = int(os.environ.get("SLIPSTREAM_INCARNATION", "0"))


def main(folder: str, killed_at: str, total: str, checkpoint: str) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    told: dict[str, object] = {"steps": [], "losses": []}
    steps, losses = [], []
    back = Path(folder, "back")
    if LIFE and int(total) <= int(killed_at) + 10:  # the others are to be done before it is back
        while not all(Path(folder, f"{rank}.0.json").exists() for rank in (0, 2)):
            time.sleep(0.02)
    with slipstream.init(start_limit_s=60, wait_limit_s=60) as job:
        torch.manual_seed(10 * LIFE + job.rank)  # nobody begins with the same weights
        net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8))
        net[3].bias.requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
        model, optimizer = job.distribute(net, optimizer, "ako(partitions=2)")
        if Path(checkpoint).exists():
            job.load(checkpoint)
        told["before"] = job.broadcast(17)
        for step in job.steps(int(total), scheduler=schedule):
            if job.rank == 1 and LIFE == 0 and step == int(killed_at):
                os.kill(os.getpid(), signal.SIGKILL)
            samples = torch.Generator().manual_seed(1000 * job.rank + step)
            inputs = torch.randn(16, 16, generator=samples)
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), inputs[:, :8].sin() + 1)
            loss.backward()
            optimizer.step()
            schedule.step()
            if LIFE:
                back.touch()
            # Slowly while somebody is away: a new process takes seconds to start, and many of them
            # on a busy machine.
            away = step >= int(killed_at) and not back.exists()
            time.sleep((0.06 if step < 200 else 0.3) if away else 0.01)
            steps.append(step)
            losses.append(loss.item())
            if step % 100 == 99:
                told["shared"] = job.broadcast(step)
                job.save(checkpoint)
    told |= {"steps": steps, "losses": losses, "digest": digest(net)}
    told["rate"] = optimizer.param_groups[0]["lr"]
    told["workers"] = len((job.summary or {}).get("weights_sha256", []))
    Path(folder, f"{job.rank}.{LIFE}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
