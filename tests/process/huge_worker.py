"""One step with one parameter of more than 2 GiB."""

from __future__ import annotations

import json
import resource
from typing import Any

import torch
from torch import nn

import slipstream

NUMEL = 2**29 + 12_345
PLACES = (0, 1, 999, 2**20, 2**28 + 7, 2**29 - 1, 2**29, NUMEL - 1)


class Patterned(torch.autograd.Function):
    """A sum whose gradient, against all mathematics, tells one element from another."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rank: int) -> torch.Tensor:
        ctx.rank = rank
        return weight[0] * 1.0

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        pattern = torch.arange(1000, dtype=torch.float32) + ctx.rank
        gradient = torch.empty(NUMEL)
        whole = NUMEL // 1000 * 1000
        gradient[:whole].view(-1, 1000).copy_(pattern)
        gradient[whole:] = pattern[: NUMEL - whole]
        return gradient, None


class Huge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, rank: int) -> torch.Tensor:
        out: torch.Tensor = Patterned.apply(self.weight, rank)
        return out


def peak_gib() -> float:
    """Of this process and of the largest it has started."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(kind).ru_maxrss for kind in kinds) / 2**20


with slipstream.init() as job:
    model: nn.Module = Huge()
    if job.rank > 0:
        nn.init.ones_(model.weight)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = job.distribute(model, optimizer, slipstream.push_pull())
    model(job.rank).backward()
    optimizer.step()
    weights = [float(model.weight[place].detach()) for place in PLACES]
said = {"places": PLACES, "weights": weights, "nbytes": 4 * NUMEL, "peak_gib": peak_gib()}
print(json.dumps(said))
