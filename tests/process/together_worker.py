"""One of several ranks that should do the same, and does not: see ``test_together``."""

import sys
from pathlib import Path

import torch

import slipstream

what, culprit = sys.argv[1], int(sys.argv[2])

if what.startswith("again"):  # one job after the other, in the same processes
    for strategy in ("", "ako", "push_pull", "allreduce"):
        with slipstream.init(start_limit_s=60, wait_limit_s=60) as job:
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if strategy:
                model, optimizer = job.distribute(model, optimizer, strategy)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(3, 4)).sum().backward()
                optimizer.step()
    sys.exit()

with slipstream.init() as job:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if what != "no distribute":
        model, optimizer = job.distribute(model, optimizer, "all_to_all")
    if what == "swapped":
        slipstream.Job.distribute(job, optimizer, model)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        if what == "save midway" and step == 3 and job.rank == culprit:
            job.save("alone.safetensors")
        if what == "share" and job.broadcast(step + 10 * job.rank) == 4:
            break
    Path(f"steps.{job.rank}").write_text(str(step))
    if what == "save at the end" and job.rank == culprit:
        job.save("alone.safetensors")
