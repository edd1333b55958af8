"""Adds a second model to a job, for which the first one is wired anew; tells what is left of it."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import torch
from cases import digest
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream
from slipstream.torch.modes.networked import NetworkedMode


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        model(inputs).square().sum().backward()
        optimizer.step()


def main(folder: str) -> None:
    start_servers_by_fork()
    with slipstream.init(start_limit_s=30, wait_limit_s=60) as job:
        models = [nn.Linear(8, 8), nn.Linear(8, 4)]
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(model.parameters(), lr=0.01) for model in models
        ]
        _, optimizers[0] = job.distribute(models[0], optimizers[0], "poseidon(choose='bytes')")
        assert isinstance(job._training.mode, NetworkedMode)
        (before,) = job._training.mode.parts
        assert before.channels.memory is not None, "workers of this host share no memory"
        memory, channel = weakref.ref(before.channels.memory), weakref.ref(before.channels.host)
        del before
        _, optimizers[1] = job.distribute(models[1], optimizers[1])
        gc.collect()
        left = [memory() is not None, channel() is not None]
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, job.rank)
        job.wait()
    told = f"{left} {digest(nn.ModuleList(models))}"
    Path(folder, f"{job.rank}.txt").write_text(told)


if __name__ == "__main__":
    main(*sys.argv[1:])
