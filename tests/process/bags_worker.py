"""Trains a small recommender with ``nn.EmbeddingBag``; writes its weights and what was sent."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from forked_servers import start_servers_by_fork
from torch import Tensor, nn

import slipstream

STRATEGY = sys.argv[1]
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(4000, 8, mode="mean")
        self.top = nn.Linear(8, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.top(self.items(ids, offsets))


start_servers_by_fork()
torch.manual_seed(0)
with slipstream.init(wait_limit_s=120) as job:
    model = Recommender()
    net, optimizer = job.distribute(model, torch.optim.SGD(model.parameters(), 0.1), STRATEGY)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids = torch.randint(0, 4000, (RANKS, 12), generator=generator)
        optimizer.zero_grad()
        net(ids[RANK], torch.tensor([0, 5, 5, 9])).square().mean().backward()
        optimizer.step()
    table = job.plan_table()
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    told = {"table": table, "weights": weights, "stats": job.stats()["bytes"]["by_scheme"]}
Path(f"told.{RANK}.json").write_text(json.dumps(told))
