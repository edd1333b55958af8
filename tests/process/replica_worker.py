"""Loops whose replicas drift apart, or do not: CASE STRATEGY; see ``CASES``."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream

CASE, STRATEGY = sys.argv[1:3]
STEPS, LATE = 30, 20
CASES = (
    "equal",
    "outer",
    "not finite",
    "hook",
    "head",
    "gradients",
    "load",
    "settings",
    "nesterov",
    "criterion",
)


def step_in_backward(bias: nn.Parameter) -> None:
    """What optimizers that save memory do, before the gradient has been exchanged."""
    own = torch.optim.SGD([bias], lr=0.1)

    def update(_: torch.Tensor) -> None:
        own.step()
        own.zero_grad()

    bias.register_post_accumulate_grad_hook(update)


def disturb(job: slipstream.Job, model: Any, optimizer: Any, begun: Any, step: int) -> None:
    """Between ``backward()`` and ``step()``."""
    if CASE == "gradients":
        model[2].weight.grad.mul_(1 + job.rank)
    if CASE == "load" and step == LATE and job.rank == 1:
        model.load_state_dict(begun)
    if CASE == "settings" and step == LATE and job.rank == 1:
        optimizer.param_groups[0]["lr"] = 0.01
    if CASE == "not finite" and step == 2:
        with torch.no_grad():
            model[0].weight.fill_(float("nan"))


assert CASE in CASES
start_servers_by_fork()
with slipstream.init(wait_limit_s=120) as job:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 3))
    optimizer: Any = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=CASE == "nesterov"
    )
    if CASE == "hook":
        step_in_backward(model[2].bias)
    model, optimizer = job.distribute(model, optimizer, STRATEGY)
    if CASE == "head":
        model[2] = nn.Linear(300, 3)
        head = torch.optim.SGD(model[2].parameters(), lr=0.05)
    if CASE == "criterion":
        criterion = nn.Linear(3, 1)
        second = torch.optim.Adam(criterion.parameters(), lr=0.05)
    begun = copy.deepcopy(model.state_dict())
    generator = torch.Generator().manual_seed(1 + job.rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        out = model(torch.randn(5, 4, generator=generator))
        if CASE == "criterion":
            out = criterion(out)
        out.square().mean().backward()
        disturb(job, model, optimizer, begun, step)
        optimizer.step()
        if CASE == "outer":
            with job.outer_weights():  # they are the workers' own
                pass
        if CASE == "criterion":
            second.step()
            second.zero_grad()
        if CASE == "head":
            head.step()
            head.zero_grad()
