"""What each host runs in ``test_run_lab``: a short job, and what the kernel counted meanwhile."""

import json
import os
from pathlib import Path

import torch
from torch import nn

import slipstream


def moved() -> dict[str, int]:
    """Bytes of this host's link, from its own side."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counted = {name.strip(): rest.split() for name, _, rest in (ln.partition(":") for ln in lines)}
    ((_, fields),) = [(name, fields) for name, fields in counted.items() if name != "lo"]
    return {"received": int(fields[0]), "sent": int(fields[8])}


before = moved()
with slipstream.init() as job:
    torch.manual_seed(job.rank)
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = job.distribute(model, optimizer)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    job.wait()
    stats = job.stats()
after = moved()
told = {
    "stats": stats,
    "moved": {key: after[key] - before[key] for key in before},
    "namespace": os.readlink("/proc/self/ns/net"),
    "servers": os.environ.get("SLIPSTREAM_SERVER_ADDRESSES", ""),
    "rank": job.rank,
}
Path(f"rank{job.rank}.json").write_text(json.dumps(told))
