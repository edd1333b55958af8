"""CPU time of a worker's training loop a step; started by ``between_commits.py``, or by hand:

slipstream run --workers 2 --strategy push_pull benchmarks/step_cpu.py gpt --json step_cpu.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import slipstream
from slipstream.apps.bench.workloads import workload

WARM_UP = 20  # steps: in the first ones gradients leave at step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=["fc", "conv", "gpt"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--average", action="store_true", help="the loop reads all weights: an EMA")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = workload(args.workload)
    with slipstream.init() as job:
        model = load.model()
        model, optimizer = job.distribute(model, load.optimizer(model))
        batches = load.batches(job.rank, job.world_size, args.batch or load.batch, seed=0)
        average = [weights.detach().clone() for weights in model.parameters()]
        cpu, wall = 0.0, 0.0
        for step in range(WARM_UP + args.steps):
            if step == WARM_UP:
                cpu, wall = time.process_time(), time.perf_counter()
            inputs, targets = next(batches)
            optimizer.zero_grad()
            load.loss(model(inputs), targets).backward()
            optimizer.step()
            if args.average:
                torch._foreach_lerp_(average, [w.detach() for w in model.parameters()], 0.01)
        job.wait()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        if job.rank == 0:
            figures = {"cpu_s": cpu / args.steps, "wall_s": wall / args.steps}
            args.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
