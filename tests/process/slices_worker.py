"""Gradients are whole numbers, so weights tell exactly which updates are in them."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

import torch
from telling import tell_of_each
from torch import nn

import slipstream

WEIGHTS = {"large": 700_000, "small": 37, "odd": 1_001}  # the first in several messages


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, numel in WEIGHTS.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(numel)))

    def forward(self, factor: float) -> torch.Tensor:
        return sum((w.sum() for w in self.parameters()), torch.zeros(())) * factor


def factor(rank: int, step: int) -> int:
    """So different that no two sums of a few are alike."""
    return (rank + 1) * (step % 16 + 1)


def counted(model: nn.Module) -> list[float]:
    """The sum of all factors whose updates each weight has, if all of it has the same."""
    values = torch.cat([w.detach() for w in model.parameters()])
    return [-values.min().item(), -values.max().item()]


def train(asked: dict[str, Any], told: dict[str, Any]) -> None:
    model: nn.Module = Sums()
    pauses = random.Random(int(os.environ["RANK"]))
    with slipstream.init(start_limit_s=60, wait_limit_s=60) as job:
        # A power of two for workers, so that their share of an update is exact.
        optimizer = torch.optim.SGD(model.parameters(), lr=float(job.world_size))
        model, optimizer = job.distribute(model, optimizer, asked["strategy"])
        for step in job.steps(asked["steps"]):
            optimizer.zero_grad()
            model(float(factor(job.rank, step))).backward()
            optimizer.step()
            time.sleep(pauses.choice([0.0, 0.0, 0.002, 0.01]))
            if step in asked.get("flushes", []):
                assert job._training.replica.partial is not None
                job._training.replica.partial.drain()  # all there is in a flush, but for the copy
                told.setdefault("drained", []).append(counted(model))
                job.share(None)
        assert job._training.replica.partial is not None
        job._training.replica.partial.drain()
        told["counted"] = counted(model)
        told["slices"] = job.stats()["slices"]


if __name__ == "__main__":
    tell_of_each(train, *sys.argv[1:])
