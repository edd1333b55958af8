"""A loop for ``test_by_hand.py``.

``by hand``: without ``step()``. ``accumulates``: many passes before its first step. ``gan``: two
pairs, of which one makes no step for long. In the last two a warning is an error.
"""

from __future__ import annotations

import sys
import warnings

import torch
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream

STRATEGY, LOOP = sys.argv[1:]
PASSES = 20


def backward(*models: nn.Module) -> None:
    nn.Sequential(*models)(torch.ones(3, 4)).square().mean().backward()


start_servers_by_fork()
torch.manual_seed(0)
models = [nn.Linear(4, 4), nn.Linear(4, 4)]
pairs = [(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
with slipstream.init(wait_limit_s=120) as job:
    if LOOP == "gan":
        (generator, first), (critic, second) = job.distribute(pairs, STRATEGY)
    else:
        generator, first = job.distribute(*pairs[0], STRATEGY)
    if LOOP != "by hand":
        warnings.simplefilter("error")
    for number in range(PASSES):
        if LOOP == "gan":
            first.zero_grad()
            backward(generator, critic)
            first.step()
            critic.zero_grad()
        elif LOOP == "accumulates" and number < PASSES / 2:
            with job.no_sync() if number % 2 else job.accumulate():
                backward(generator)
        elif LOOP == "accumulates":
            backward(generator)
        else:
            generator.zero_grad()
            backward(generator)
            with torch.no_grad():
                for parameter in generator.parameters():
                    parameter -= 0.1 * parameter.grad
    if LOOP == "accumulates":
        first.step()
    if LOOP == "gan":
        backward(generator, critic)
        second.step()
