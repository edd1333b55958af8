"""Trains on leased batches with rounds of the first two workers; sample i moves weight i alone."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
from backup_worker import NEVER, Board, wait_until
from torch import Tensor, nn

import slipstream
from slipstream import Strategy
from slipstream.codecs import Above, Dense, Filter
from slipstream.consistency import Consistency, FirstOf
from slipstream.methods import Rounds
from slipstream.routes import Everywhere, Route
from slipstream.topologies import Sharded
from slipstream.updates import Update, UserOptimizer

SAMPLES, BATCH, ROUNDS, FIRST, RANKS = 96, 4, 60, 2, 3
LATE, WITHIN = RANKS - 1, 6
CODECS = {"filter": Filter(Above(0.0)), "dense": Dense()}


class Counts(nn.Module):
    """Its weight i grows by lr / FIRST for every time that sample i counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, samples: Tensor) -> Tensor:
        return -self.weight[samples].sum()


class Turns:
    """Makes one rank late for two rounds of three, and never by more than a few."""

    def __init__(self, rank: int) -> None:
        self._rank, self._steps = rank, 0
        self._there, self._begun = Board(rank, "there"), Board(rank, "begun")

    def take(self, round_: int) -> None:
        self._there.post(round_ + 1)
        self._steps += 1
        if self._rank != LATE:
            wait_until(lambda: self._there.read(RANKS)[LATE] > round_ - WITHIN)
        elif self._steps % 3:
            over = min(round_ + 2, ROUNDS)  # whoever has begun the next round has seen this one end
            wait_until(lambda: max(self._begun.read(RANKS)) >= over)
        self._begun.post(round_ + 1)

    def end(self) -> None:
        self._there.post(NEVER)
        self._begun.post(NEVER)


if __name__ == "__main__":
    route = Route(Sharded(), up=CODECS[sys.argv[1]])
    strategy = Strategy(
        "leased",
        Rounds(
            Everywhere(route), Consistency(FirstOf(FIRST)), Update(outer=UserOptimizer(at="server"))
        ),
    )
    dealt: list[int] = []
    with slipstream.init(start_limit_s=60, wait_limit_s=60) as job:
        model: nn.Module = Counts()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = job.distribute(model, optimizer, strategy)
        sampler = job.sampler(range(SAMPLES), BATCH)
        batches = itertools.chain.from_iterable(itertools.repeat(sampler))  # epoch after epoch
        turns = Turns(job.rank)
        for round_ in job.steps(ROUNDS):
            samples = next(batches)
            turns.take(round_)
            optimizer.zero_grad()
            model(torch.tensor(samples)).backward()
            optimizer.step()
            dealt += samples
        turns.end()
    told = {"dealt": dealt, "summary": job.summary, "weight": model.state_dict()["weight"].tolist()}
    Path(f"told.{job.rank}").write_text(json.dumps(told))
