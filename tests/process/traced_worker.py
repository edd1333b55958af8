"""Trains one parameter with push_pull, and writes the calls that an update and a flush made."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from call_trace import CallTrace
from forked_servers import start_servers_by_fork

import slipstream

# Steps: replicas are compared at the first, and before the ninth.
UNTRACED, TRACED = 3, 5


def main(folder: str, not_core: str) -> None:
    start_servers_by_fork()
    root = Path(slipstream.__file__).parent

    def name_of(path: str) -> str | None:
        if not path.startswith(f"{root}{os.sep}"):
            return None
        name = Path(path).relative_to(root)
        return None if name.parts[0] in not_core.split(",") else str(name)

    updates, flush = CallTrace(name_of), CallTrace(name_of)
    updates.install()  # before slipstream starts the thread that handles messages
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(16, 8, bias=False)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with slipstream.init(start_limit_s=60, wait_limit_s=60) as job:
        model, optimizer = job.distribute(model, optimizer, slipstream.push_pull())
        for step in job.steps(UNTRACED + TRACED):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 16)).square().mean()
            if step < UNTRACED:
                job.broadcast(None)  # whatever other ranks have sent to rank 0 before has arrived
                loss.backward()
                optimizer.step()
                continue
            if job.rank:
                time.sleep(0.2)  # rank 0 then waits for its result
            with updates.recording():
                loss.backward()
                optimizer.step()
        updates.remove()
        flush.install()
        with flush.recording():
            job.flush()
        flush.remove()
        told = {
            "updates": {name: sorted(stacks) for name, stacks in updates.stacks.items()},
            "flush": {name: sorted(stacks) for name, stacks in flush.stacks.items()},
        }
        Path(folder, f"calls.{job.rank}.json").write_text(json.dumps(told))


main(*sys.argv[1:])
