"""What each worker of a host runs in ``test_run_lab``: what the host's link moved in some steps."""

import hashlib
import json
import os
from pathlib import Path

import torch
from torch import nn

import slipstream

STEPS = 6


def moved() -> int:
    """Bytes of this host's link, both ways."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    fields = [line.partition(":")[2].split() for line in lines if not line.strip().startswith("lo")]
    return sum(int(each[0]) + int(each[8]) for each in fields)


with slipstream.init() as job:
    torch.manual_seed(job.rank)
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = job.distribute(model, optimizer, "push_pull")
    # Barriers on both sides of each look: nothing that steps send is under way then.
    job.broadcast(None)
    before = moved()
    job.broadcast(None)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    job.broadcast(None)
    counted = moved() - before
    job.broadcast(None)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    on_host = int(os.environ["LOCAL_WORLD_SIZE"])
told = {
    "rank": job.rank,
    "host": job.rank // on_host,
    "local": os.environ["LOCAL_RANK"],
    "moved": counted,
    "digest": hashlib.sha256(weights).hexdigest(),
}
Path(f"rank{job.rank}.json").write_text(json.dumps(told))
