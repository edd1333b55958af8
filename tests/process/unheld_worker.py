"""A small job with parameters that train, are frozen, or get no gradient: STRATEGY [WRONG].

``unheld``: no optimizer holds a parameter that gets a gradient. ``by hand``: the loop updates
weights itself, and calls no ``step()``. Writes what this rank's weights are at the end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream

STRATEGY, WRONG = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.frozen, self.unused = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.frozen(self.first(x))))


def held(model: Net) -> list[nn.Parameter]:
    """Neither the frozen layer nor the unused one is in the optimizer, unless all are."""
    layers = [model.first] if WRONG == "unheld" else [model.first, model.second]
    return [parameter for layer in layers for parameter in layer.parameters()]


start_servers_by_fork()
torch.manual_seed(0)
with slipstream.init(wait_limit_s=120) as job:
    model = Net()
    model, optimizer = job.distribute(model, torch.optim.SGD(held(model), lr=0.1), STRATEGY)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + job.rank + step)).square().mean().backward()
        if WRONG == "by hand":
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-0.1)
            optimizer.zero_grad()
        else:
            optimizer.step()
weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
Path(f"weights.{os.environ.get('RANK', 0)}.json").write_text(json.dumps(weights))
