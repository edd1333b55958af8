"""Trains with a strategy that no named system is, and writes down what must hold of it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import digest
from forked_servers import start_servers_by_fork
from mix_strategies import MIXES
from torch import Tensor, nn

import slipstream
from slipstream.torch.modes.networked import NetworkedMode

STEPS, BATCH, INPUTS, HIDDEN, OUTPUTS, RATE = 12, 4, 24, 48, 16, 0.05


def build(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS)
    return nn.Sequential(*layers).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    samples = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(BATCH, INPUTS, generator=samples, dtype=torch.float64).to(dtype)
    return inputs, inputs[:, :OUTPUTS].sin()


def weights(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().double().tolist() for name, tensor in model.named_parameters()}


def owed(job: slipstream.Job) -> dict[str, Any]:
    """What this worker's codecs still hold back, by parameter."""
    assert isinstance(job._training.mode, NetworkedMode)
    found: dict[str, Tensor] = {}
    links = job._training.mode.parts[0].channels.links
    for channel in [] if links is None else [links]:
        for chunk in job.plan.chunks:
            memories = channel.memories(chunk)
            for segment, memory in zip(chunk.segments, memories, strict=True):
                spec = job.plan.specs[segment.tensor]
                whole = found.setdefault(spec.name, torch.zeros(spec.numel).double())
                if memory is not None:
                    whole[segment.start : segment.stop] = torch.from_numpy(memory).double()
    order = (spec.name for spec in job.plan.specs if spec.role == "parameter")
    return {name: found[name].tolist() for name in order if name in found}


def wait_for(marks: list[Path]) -> None:
    deadline = time.monotonic() + 60
    while missing := [mark.name for mark in marks if not mark.exists()]:
        assert time.monotonic() < deadline, f"the other ranks have not written {missing}"
        time.sleep(0.005)


def fall_behind(folder: Path, rank: int, step: int, late: int = 2) -> None:
    """Hold one rank back until the others have closed its first round without it, and then the
    others until servers have dropped what it sent for that round: they might end before."""
    if rank == late:
        if step == 0:
            wait_for([folder / f"ahead-{other}" for other in range(late)])
        else:
            # It has the weights of a later round: servers have answered its late gradient.
            (folder / "dropped").touch()
    elif step == 2:
        # It has the weights of round 1, so round 0 is closed.
        (folder / f"ahead-{rank}").touch()
    elif step == 3:
        wait_for([folder / "dropped"])


def main(name: str, folder: str, dtype_name: str) -> None:
    start_servers_by_fork()
    dtype = getattr(torch, dtype_name)
    model = build(dtype)
    begun = weights(model)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    given = {name: torch.zeros_like(p).double() for name, p in model.named_parameters()}
    with slipstream.init(start_limit_s=30, wait_limit_s=60) as job:
        model, optimizer = job.distribute(model, optimizer, MIXES[name])
        for step in job.steps(STEPS):
            inputs, targets = batch(job.rank, step, dtype)
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            if name.endswith("backup workers"):
                fall_behind(Path(folder), job.rank, step)
            loss.backward()
            for own, parameter in model.named_parameters():
                if parameter.grad is not None:
                    given[own] += parameter.grad.double()
            optimizer.step()
        job.wait()
        told: dict[str, Any] = {"owed": owed(job), "stats": job.stats()}
        told["held"] = {
            node: [s.numel for chunk in job.plan.chunks_of(node) for s in chunk.segments]
            for node in range(job.world_size)
        }
        if job.plan.update.average is not None:
            with job.averaged_weights():
                told["averaged"] = weights(model)
        job.flush()
    told |= {"digest": digest(model), "begun": begun, "weights": weights(model)}
    told["given"] = {name: values.tolist() for name, values in given.items()}
    Path(folder, f"{job.rank}.json").write_text(json.dumps(told, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
