"""A critic with a gradient penalty (WGAN-GP), three backward passes a step: STRATEGY."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream

RANK = int(os.environ.get("RANK", 0))

start_servers_by_fork()
torch.manual_seed(0)
with slipstream.init(wait_limit_s=120) as job:
    body = nn.Sequential(nn.Linear(64, 300), nn.Softplus(), nn.Linear(300, 300), nn.Softplus())
    critic = nn.ModuleDict({"body": body, "head": nn.Linear(300, 1)})
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
    critic, optimizer = job.distribute(critic, optimizer, sys.argv[1])

    def score(x: torch.Tensor) -> torch.Tensor:
        return critic["head"](critic["body"](x))

    generator = torch.Generator().manual_seed(1 + RANK)
    for _ in range(3):
        real, fake = (torch.randn(4, 64, generator=generator) for _ in range(2))
        optimizer.zero_grad()
        (-score(real).mean()).backward()
        score(fake).mean().backward()
        between = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(score(between).sum(), between, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        optimizer.step()
    weights = {name: tensor.tolist() for name, tensor in critic.state_dict().items()}
    told = {"weights": weights, "schemes": job.stats()["bytes"]["by_scheme"]}
Path(f"told.{RANK}.json").write_text(json.dumps(told))
