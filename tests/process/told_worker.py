"""Writes what a job tells its user: the plan's table, warnings, and weights that all share."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream


def main(folder: str) -> None:
    start_servers_by_fork()
    with slipstream.init(start_limit_s=60, wait_limit_s=60) as job:
        model = nn.Linear(64, 64).to(torch.bfloat16)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, optimizer = job.distribute(model, optimizer, "push_pull(wire='int8')")
        model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        job.wait()
        own = model.weight.tolist()
        with job.outer_weights():
            same = model.weight.tolist() == own
        told = {"table": job.plan_table(), "warned": [str(w.message) for w in caught], "same": same}
    Path(folder, f"{job.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
