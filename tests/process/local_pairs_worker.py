"""Two models with an optimizer each, and local steps: a flush between rounds, then more steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from cases import digest
from torch import nn

import slipstream


def main(folder: str, resume: str = "") -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    pairs = [
        (first, torch.optim.Adam(first.parameters(), lr=0.01)),
        (second, torch.optim.SGD(second.parameters(), lr=0.01)),
    ]
    told = {}
    with slipstream.init(start_limit_s=60, wait_limit_s=60) as job:
        (first, of_first), (second, of_second) = job.distribute(pairs, slipstream.diloco(every=3))
        path = Path(folder, "saved.safetensors")
        if resume:
            job.load(path)
        for step in range(6 if resume else 0, 9):
            samples = torch.Generator().manual_seed(100 * job.rank + step)
            of_first.zero_grad()
            of_second.zero_grad()
            second(first(torch.randn(8, 4, generator=samples))).pow(2).mean().backward()
            of_first.step()
            if step % 2:
                of_second.step()
            if step == 3:
                job.flush()
                told["flushed"] = [digest(first), digest(second)]
            if step == 5 and not resume:  # between rounds, of both
                job.save(path)
        told["own"] = [digest(first), digest(second)]
    told["ended"] = [digest(first), digest(second)]
    Path(folder, f"{job.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
