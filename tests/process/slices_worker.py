"""Gradients are whole numbers, so weights tell exactly which updates are in them."""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from telling import tell_of_each
from torch import nn

import slipstream
from slipstream.runtime.gossip.gossip import GossipChannel
from slipstream.torch.modes.networked import NetworkedMode

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


def evaluate_others(job: slipstream.Job, model: nn.Module) -> None:
    """As with averaged weights, which a library puts into the model and takes out again; on rank 0
    peers' updates arrive meanwhile."""
    own = [weights.detach().clone() for weights in model.parameters()]
    for weights in model.parameters():
        weights.data.fill_(0.5)
    await_updates(job)
    for weights, values in zip(model.parameters(), own, strict=True):
        weights.data.copy_(values)


def await_updates(job: slipstream.Job) -> None:
    """On rank 0."""
    before, deadline = received(job), time.monotonic() + 60
    while job.rank == 0 and received(job) == before:
        assert time.monotonic() < deadline, "nothing arrives"
        time.sleep(0.001)


def received(job: slipstream.Job) -> int:
    return channel_of(job).received.total()


def channel_of(job: slipstream.Job) -> GossipChannel:
    assert isinstance(job._training.mode, NetworkedMode)
    channel = job._training.mode.parts[0].channels.partial
    assert channel is not None
    return channel


def train(asked: dict[str, Any], told: dict[str, Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count(asked, told)
    told["warned"] = [str(warning.message) for warning in caught]


def count(asked: dict[str, Any], told: dict[str, Any]) -> None:
    model: nn.Module = Sums()
    pauses = random.Random(int(os.environ["RANK"]))
    with slipstream.init(start_limit_s=60, wait_limit_s=60) as job:
        # A power of two for workers, so that their share of an update is exact.
        optimizer = torch.optim.SGD(model.parameters(), lr=float(job.world_size))
        model, optimizer = job.distribute(model, optimizer, asked["strategy"])
        if asked.get("loads"):
            await_updates(job)
            model.load_state_dict(Sums().state_dict())
        for step in job.steps(asked["steps"]):
            optimizer.zero_grad()
            model(float(factor(job.rank, step))).backward()
            optimizer.step()
            time.sleep(pauses.choice([0.0, 0.0, 0.002, 0.01]))
            if step in asked.get("swaps", []):
                with job.swapped_weights() if asked["in_block"] else nullcontext():
                    evaluate_others(job, model)
            if step in asked.get("flushes", []):
                channel_of(job).drain()  # all there is in a flush, but for the copy
                told.setdefault("drained", []).append(counted(model))
                job.broadcast(None)
        channel_of(job).drain()
        told["counted"] = counted(model)
        told["slices"] = job.stats()["slices"]


if __name__ == "__main__":
    tell_of_each(train, *sys.argv[1:])
