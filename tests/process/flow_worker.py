"""Trains with the strategies it is told of, one after the other, and tells what became of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cases import digest
from telling import tell_of_each
from torch import nn

import slipstream
from slipstream._native import crc32c
from slipstream.codecs import Filter
from slipstream.strategy import Strategy
from slipstream.systems import parse
from slipstream.topologies import Tree
from slipstream.torch.modes.networked import NetworkedMode
from slipstream.transports.wire import Push
from slipstream.types import EncodeContext, Values

INPUTS, HIDDEN, OUTPUTS, BATCH = 24, 96, 16, 16


class Net(nn.Module):
    """Weights that are filtered, biases that are not, statistics, and a branch seldom taken."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.seldom = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.last = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, inputs: torch.Tensor, step: int) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)))
        if step % 3 == 1:
            hidden = hidden + self.seldom(hidden)
        return self.last(hidden)


def die(after_s: float = 0.0) -> None:
    """At once, or when what has been sent has left."""
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def stop_until(mark: str) -> None:
    """Stand still, as a machine does that is suspended."""
    waking = f"until [ -e {mark} ]; do sleep 0.1; done; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", waking])
    os.kill(os.getpid(), signal.SIGSTOP)


def mind_the_stopped(asked: dict[str, Any], rank: int, step: int) -> None:
    """One stops; it wakes when the others have gone on without it, and they end after it."""
    culprit, at = asked["stopped"]
    if (rank, step) == (culprit, at):
        stop_until("gone_on")
    elif rank != culprit and step == at + 10:
        Path("gone_on").touch()
    elif rank != culprit and step + 1 == asked["steps"]:
        told = Path(sys.argv[1]).with_name(f"{asked['name']}.{culprit}.json")
        deadline = time.monotonic() + 60
        while not told.exists():
            assert time.monotonic() < deadline, "the one that was stopped was told nothing"
            time.sleep(0.02)


def forge(job: slipstream.Job) -> None:
    """Pushes that do not fit, each in its own way; the right ones follow.

    From another process in this one's name: its own would end the job.
    """
    assert isinstance(job._training.mode, NetworkedMode)
    membership = job._training.mode.membership
    transport = membership.transport
    own, transport.process = transport.process, 7
    plan = job.plan
    unit = next(unit for unit in plan.units if isinstance(plan.route(unit).up, Filter))
    codec, (chunk,) = plan.route(unit).up, unit.chunks
    numel = chunk.segments[0].numel
    for frame in (
        packed(codec, np.ones(numel + 64)),  # more bits than elements
        packed(codec, np.ones(numel) * (np.arange(numel) % 2))[:-4],  # values short
        packed(codec, np.eye(1, 2 * numel, 2 * numel - 1)[0]),  # an index out of range
        b"",
    ):
        body = Push(unit.index, job.step, job.step, [1] * len(chunk.segments), crc32c(frame))
        server = plan.cluster.name(plan.holders[unit.index][0])
        membership.member.send(server, body, [frame] * len(chunk.segments))
    transport.process = own


def packed(codec: Filter, content: np.ndarray) -> bytes:
    values = Values(content.astype(np.float32).view(np.uint8), "float32")
    (frame,) = codec.encode(values, codec.init(values.numel, "float32"), EncodeContext())
    return bytes(memoryview(frame))


def strategy_of(asked: dict[str, Any]) -> Strategy:
    if asked.get("children"):
        return slipstream.parameter_flow(tree=Tree(asked["children"]), **asked["options"])
    return parse(asked["strategy"])


def train(asked: dict[str, Any], told: dict[str, Any]) -> None:
    torch.manual_seed(2)
    net = Net()
    weights = {"momentum": 0.5} if asked.get("momentum", True) else {}
    kind = getattr(torch.optim, asked.get("optimizer", "SGD"))
    optimizer = kind(net.parameters(), lr=asked.get("lr", 0.1), **weights)
    with slipstream.init(start_limit_s=60, wait_limit_s=60, silence_limit_s=10) as job:
        model, optimizer = job.distribute(net, optimizer, strategy_of(asked))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
        if asked.get("load"):
            job.load(asked["load"])
            told["loaded"] = digest(net)
            job.broadcast(None)
            schedule.last_epoch = job.step
        told["losses"] = []
        for step in job.steps(asked["steps"] + asked.get("more_steps", [0] * 9)[job.rank]):
            time.sleep(asked.get("pause_s", [0.0])[job.rank % len(asked.get("pause_s", [0.0]))])
            if [job.rank, step] == asked.get("killed"):
                die()
            if [job.rank, step] == asked.get("killed_within"):
                net.first.weight.register_hook(lambda _: die(after_s=0.3))
            if "stopped" in asked:
                mind_the_stopped(asked, job.rank, step)
            if [job.rank, step] == asked.get("forges"):
                forge(job)
            samples = torch.Generator().manual_seed(1000 * job.rank + step)
            inputs = torch.randn(BATCH, INPUTS, generator=samples)
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs, step), inputs[:, :OUTPUTS].sin())
            loss.backward()
            optimizer.step()
            schedule.step()
            told["losses"].append(loss.item())
            if [job.rank, step] == asked.get("killed_after"):
                die()
            if step + 1 == asked.get("mean_at"):
                told["apart"] = job.consensus().spread
                job.flush()
                told["flushed"] = digest(net)
                job.broadcast(None)  # before anybody trains on, and sends what others would add
                told["together"] = job.consensus().spread
            if step + 1 == asked.get("save_at"):
                job.save(asked["save"])
                told["saved"] = digest(net)
                job.broadcast(None)
        told["step"] = job.step
        told["refused"] = job.stats().get("refused_by_servers")
        told["slices"] = job.stats().get("slices")
    told["digest"] = digest(net)
    told["sent"] = job._training.mode.parts[0].channels.bytes()[0].total()


if __name__ == "__main__":
    tell_of_each(train, *sys.argv[1:])
