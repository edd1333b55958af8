"""A small job with one thing wrong, named on the command line."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream

WRONG = sys.argv[1]
STRATEGY = sys.argv[2] if len(sys.argv) > 2 else "push_pull"
ODD = os.environ.get("RANK") == "1"  # the rank that differs, where only one does
SERVERS = 9 if WRONG == "servers" else None
WAIT_S = 20.0
STEPS = 6


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 4)}
    if WRONG == "names" and ODD:
        layers = {"first": layers["first"], "other": layers["second"]}
    if WRONG == "shape" and ODD:
        layers["second"] = nn.Linear(8, 5)
    if WRONG == "dtype" and ODD:
        layers["second"].double()
    if WRONG == "frozen differs" and ODD:
        layers["second"].requires_grad_(False)
    if WRONG == "extra" and ODD:
        layers["third"] = nn.Linear(2, 2)
    if WRONG == "nothing to train":
        for layer in layers.values():
            layer.requires_grad_(False)
    return nn.ModuleDict(layers)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if WRONG == "foreign":
        parameters.append(nn.Parameter(torch.zeros(3, 7)))
    if WRONG == "foreign on one" and ODD:
        parameters.append(nn.Parameter(torch.zeros(3, 7)))
    if WRONG == "unheld":
        parameters = list(model["first"].parameters())
    if WRONG == "lbfgs":
        return torch.optim.LBFGS(parameters)
    if WRONG == "optimizers" and ODD:
        return torch.optim.Adam(parameters)
    return torch.optim.SGD(parameters, lr=0.1)


def train(job: Any) -> None:
    model = make_model()
    strategy = "all_to_all" if WRONG == "strategies" and ODD else STRATEGY
    optimizer = make_optimizer(model)
    if WRONG == "state":
        optimizer.state[model["first"].weight]["momentum_buffer"] = torch.zeros(3, 3)
    model, optimizer = job.distribute(model, optimizer, strategy)
    if WRONG == "weights differ":
        nn.init.constant_(model["first"].weight, job.rank)
    if WRONG == "distribute twice":
        job.distribute(model, optimizer, strategy)
    steps = STEPS
    values = torch.ones(2, 8)
    if WRONG == "converted" and ODD:
        model.double()
        values = values.double()
    if ODD and WRONG.endswith(("leaves early", "stays longer")):
        steps += -2 if WRONG.endswith("leaves early") else 2
    for step in range(steps):
        optimizer.zero_grad()
        times = 2 if WRONG == "more passes" and ODD and step == 2 else 1
        times = 2 if WRONG == "last pass" and ODD and step == STEPS - 1 else times
        for _ in range(times):
            hidden = torch.tanh(model["first"](values))
            model["second"](hidden).pow(2).mean().backward()
        if WRONG.startswith("by hand"):
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.1)
            continue
        optimizer.step()
        if WRONG.startswith("weights changed") and step == steps - 2:
            nn.init.zeros_(model["first"].weight)
        if WRONG == "weights changed, then waited" and step == steps - 2:
            job.wait()
        if (WRONG == "state on one" and ODD and step == 1) or WRONG == "state too late":
            optimizer.load_state_dict(optimizer.state_dict())


start_servers_by_fork()
with slipstream.init(servers=SERVERS, start_limit_s=20, wait_limit_s=WAIT_S) as job:
    if WRONG == "save too early":
        job.save("nowhere")
    train(job)
