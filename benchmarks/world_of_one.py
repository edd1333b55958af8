"""A world of one against the plain loop, step by step in turns: slipstream must cost nothing there.

python benchmarks/world_of_one.py --json world_of_one.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import slipstream
from slipstream.apps.bench.comparison import machine_facts
from slipstream.apps.bench.workloads import Workload, workload


def loop_body(
    load: Workload, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[], float]:
    """Takes a step; returns how long it took."""
    batches = load.batches(0, 1, load.batch, seed=0)

    def step() -> float:
        begun = time.perf_counter()
        inputs, targets = next(batches)
        optimizer.zero_grad()
        load.loss(model(inputs), targets).backward()
        optimizer.step()
        return time.perf_counter() - begun

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = workload("conv")
    plain_model, model = load.model(), load.model()
    plain = loop_body(load, plain_model, load.optimizer(plain_model))
    with slipstream.init() as job:
        ours = loop_body(load, *job.distribute(model, load.optimizer(model), "push_pull"))
        turns, times = [plain, ours], {plain: [], ours: []}
        for _ in range(10 + args.steps):
            turns.reverse()  # neither always comes after the other
            for step in turns:
                times[step].append(step())
    plain_s, ours_s = (statistics.median(times[step][10:]) for step in (plain, ours))
    print(f"plain {plain_s:.4f} s, slipstream {ours_s:.4f} s, ratio {ours_s / plain_s:.3f}")
    if args.json:
        report = {"machine": machine_facts(), "plain_s": plain_s, "slipstream_s": ours_s}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
