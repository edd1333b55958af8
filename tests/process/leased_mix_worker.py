"""Trains on leased batches with rounds of the first two workers; sample i moves weight i alone."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import slipstream
from slipstream import Consistency, FirstOf, Route, Sharded, Strategy, Update, User
from slipstream.codecs import Above, Dense, Filter

SAMPLES, BATCH, ROUNDS, FIRST, RANKS = 96, 4, 60, 2, 3
CODECS = {"filter": Filter(Above(0.0)), "dense": Dense()}


class Counts(nn.Module):
    """Its weight i grows by lr / FIRST for every time that sample i counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, samples: Tensor) -> Tensor:
        return -self.weight[samples].sum()


if __name__ == "__main__":
    route = Route(Sharded(), up=CODECS[sys.argv[1]])
    strategy = Strategy(
        "leased",
        slipstream.Everywhere(route),
        Consistency(FirstOf(FIRST)),
        Update(outer=User(at="holder")),
    )
    dealt: list[int] = []
    with slipstream.init(start_limit_s=60, wait_limit_s=60) as job:
        model: nn.Module = Counts()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = job.distribute(model, optimizer, strategy)
        sampler = job.sampler(range(SAMPLES), BATCH)
        batches = itertools.chain.from_iterable(itertools.repeat(sampler))  # epoch after epoch
        for _ in job.steps(ROUNDS):
            samples = next(batches)
            time.sleep(0.02 * (job.rank == RANKS - 1))  # the last rank is late for most rounds
            optimizer.zero_grad()
            model(torch.tensor(samples)).backward()
            optimizer.step()
            dealt += samples
    told = {"dealt": dealt, "summary": job.summary, "weight": model.state_dict()["weight"].tolist()}
    Path(f"told.{job.rank}").write_text(json.dumps(told))
