"""Trains with one bit a value; saves on the way or begins from what was saved, and tells."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from cases import digest
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream
from slipstream.torch.modes.networked import NetworkedMode

HALF, BATCH, INPUTS, HIDDEN, OUTPUTS = 12, 16, 24, 96, 16


def owed(job: slipstream.Job) -> dict[str, float]:
    """What this worker still owes, weighed and summed by tensor: its plain sum is always near 0."""
    assert isinstance(job._training.mode, NetworkedMode)
    links = job._training.mode.parts[0].channels.links
    exchanges = [] if links is None else [links]  # none where another speaks for the host
    sums: dict[str, float] = {}
    for exchange, chunk in itertools.product(exchanges, job.plan.chunks):
        for segment, memory in zip(chunk.segments, exchange.memories(chunk), strict=True):
            if memory is not None:
                spec = job.plan.specs[segment.tensor]
                scale = np.random.default_rng(spec.numel).normal(size=spec.numel)
                owes = float(scale[segment.start : segment.stop] @ memory)
                sums[spec.name] = sums.get(spec.name, 0.0) + owes
    return sums


def main(checkpoint: str, doing: str) -> None:
    torch.manual_seed(2)
    model: nn.Module = nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS)
    )
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    told: dict[str, object] = {}
    with slipstream.init(start_limit_s=60, wait_limit_s=60) as job:
        model, optimizer = job.distribute(model, optimizer)
        if doing == "resume":
            job.load(checkpoint)
            told["owed"] = owed(job)
        for step in job.steps(2 * HALF):
            samples = torch.Generator().manual_seed(1000 * job.rank + step)
            inputs = torch.randn(BATCH, INPUTS, generator=samples)
            optimizer.zero_grad()
            F.mse_loss(model(inputs), inputs[:, :OUTPUTS].sin()).backward()
            optimizer.step()
            if doing == "save" and job.step == HALF:
                job.save(checkpoint)
                told["owed"] = owed(job)
        told["digest"] = digest(model)
        told["step"] = job.step
    Path(checkpoint).with_name(f"{doing}.{job.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    start_servers_by_fork()
    main(*sys.argv[1:])
