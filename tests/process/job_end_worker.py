"""A job's end, as its first argument asks for: CASE STRATEGY.

``plateau``: each rank's learning rate follows its own loss; ``mean`` the mean of all; ``by hand``:
one rank changes a weight. ``no with``: the script has no ``with`` block; ``no with, error``: and
fails on rank 1; ``no with, exit``: and calls ``sys.exit(3)`` there; ``no with, caught exit``: and
catches it; ``no with, early``: rank 1 ends before the others; ``no with, large``: its messages
are so large that ZeroMQ does not copy them.
"""

from __future__ import annotations

import contextlib
import sys

import torch
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream

CASE, STRATEGY = sys.argv[1:3]
STEPS = 6


def train(job: slipstream.Job) -> None:
    torch.manual_seed(0)
    width = 20_000 if "large" in CASE else 3
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    net, optimizer = job.distribute(model, optimizer, STRATEGY)
    for step in range(STEPS - (job.rank if "early" in CASE else 0)):
        optimizer.zero_grad()
        loss = net(torch.randn(5, 4)).square().mean()
        loss.backward()
        optimizer.step()
        # Rank 0's loss falls, rank 1's rises.
        own = float(-step if job.rank == 0 else 3 * step)
        if CASE == "plateau":
            plateau.step(own)
        if CASE == "mean":
            plateau.step(job.mean(torch.tensor(own)))
        if "exit" in CASE and job.rank == 1 and step == 2:
            with contextlib.suppress(SystemExit):
                sys.exit(5)  # nobody is told of this one
            if "caught" not in CASE:
                sys.exit(3)
        if "error" in CASE and job.rank == 1 and step == 2:
            raise ValueError("of the script")
    if CASE == "by hand" and job.rank == 1:
        with torch.no_grad():
            model[0].weight.add_(1.0)
    net(torch.randn(5, 4))  # statistics of batch norm may differ at the end
    if "early" in CASE:
        return
    if "caught" in CASE:
        with contextlib.suppress(SystemExit):
            sys.exit(2)
    given = job.gather({"rank": job.rank})
    print("gathered", given, "lr", optimizer.param_groups[0]["lr"], flush=True)


start_servers_by_fork()
if "no with" in CASE:
    train(slipstream.init(wait_limit_s=120))
else:
    with slipstream.init(wait_limit_s=120) as job:
        train(job)
