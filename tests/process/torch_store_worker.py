"""Trains with slipstream and talks by torch's default group; argv says which comes first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed, nn

import slipstream

CASE = sys.argv[1]
STRATEGY = sys.argv[2] if len(sys.argv) > 2 else "push_pull"


def talk(what: str) -> None:
    """A collective of the default group, and one of a new group, which needs the store again."""
    total = torch.tensor([float(distributed.get_rank() + 1)])
    distributed.all_reduce(total)
    everybody = distributed.new_group(list(range(distributed.get_world_size())))
    told: list[object] = [None] * distributed.get_world_size()
    distributed.all_gather_object(told, distributed.get_rank(), group=everybody)
    # One write: both ranks may have the same pipe.
    sys.stdout.write(f"{what} {int(total.item())} {told}\n")
    sys.stdout.flush()


def train(job: slipstream.Job) -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = nn.Linear(8, 4)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = job.distribute(model, optimizer, STRATEGY)
    if CASE == "torch after distribute":
        distributed.init_process_group("gloo")
    for step in range(5):
        optimizer.zero_grad()
        F.mse_loss(model(torch.full((2, 8), job.rank + step + 1.0)), torch.zeros(2, 4)).backward()
        optimizer.step()
    job.wait()
    return model


if CASE == "torch first":
    distributed.init_process_group("gloo")
    talk("before")
with slipstream.init() as job:
    if CASE == "slipstream first":
        distributed.init_process_group("gloo")
        talk("before")
    if CASE == "job's":
        job.init_process_group()
        job.init_process_group("gloo")  # it is there
        talk("before")
    model = train(job)
    if CASE == "fails":
        job.init_process_group()
        if job.rank == 1:
            raise ZeroDivisionError("rank 1 has enough")
        distributed.all_reduce(torch.ones(1))
    if CASE == "job's, after distribute":
        job.init_process_group("gloo")
    if CASE != "torch afterwards":
        talk("within")
if CASE == "torch afterwards":
    distributed.init_process_group("gloo")
if CASE.startswith("job's"):
    assert not distributed.is_initialized()  # it ends with the job
else:
    talk("afterwards")
    with slipstream.init() as job:  # a second job, beside the group
        again = train(job) if CASE != "torch after distribute" else model
        talk("again")
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    distributed.destroy_process_group()
Path(f"weights.{os.environ['RANK']}").write_text(str(model.weight.double().sum().item()))
