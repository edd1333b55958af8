"""The exchange of JAX's gradients against that of torch's, in turns within one job.

Both have tensors of the same shapes, whose gradients are computed before the clock starts; the time
is that of ``engine.mean`` and of an ``optimizer.step()`` that updates nothing.

slipstream run --workers 2 --strategy push_pull benchmarks/jax_exchange.py --json jax_exchange.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

import slipstream
from slipstream.apps.bench.comparison import machine_facts

WARM = 5


class NoUpdate(torch.optim.Optimizer):
    """Its step is the exchange, and nothing else."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        """Nothing."""


def shapes(mbytes: float, layers: int) -> list[tuple[int, ...]]:
    """So many layers of even size, each with a kernel and a bias."""
    rows = int(mbytes * 1e6 / 4 / layers / 256)
    return [shape for _ in range(layers) for shape in ((rows, 256), (256,))]


def torch_exchange(job: slipstream.Job, sizes: list[tuple[int, ...]]) -> Callable[[], float]:
    """Exchanges once; returns how long it took."""
    model = nn.ParameterList([torch.zeros(size) for size in sizes])
    trained, optimizer = job.distribute(model, NoUpdate(model.parameters()))
    parameters = list(trained.parameters())

    def exchange() -> float:
        for parameter in parameters:
            parameter.grad = parameter.detach() + 1.0
        job.broadcast(None)
        begun = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - begun

    return exchange


def jax_exchange(job: slipstream.Job, sizes: list[tuple[int, ...]]) -> Callable[[], float]:
    """Exchanges once; returns how long it took."""
    engine = slipstream.jax.engine(job, [jnp.zeros(size) for size in sizes])
    gradients = jax.jit(lambda params: [param + 1.0 for param in params])

    def exchange() -> float:
        grads = jax.block_until_ready(gradients(engine.params))
        job.broadcast(None)
        begun = time.perf_counter()
        jax.block_until_ready(engine.mean(grads))
        return time.perf_counter() - begun

    return exchange


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbytes", type=float, default=25.0)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = shapes(args.mbytes, args.layers)
    with slipstream.init() as job:
        ways = {"torch": torch_exchange(job, sizes), "jax": jax_exchange(job, sizes)}
        turns, times = list(ways), {name: [] for name in ways}
        for _ in range(WARM + args.rounds):
            turns.reverse()  # neither always comes after the other
            for name in turns:
                times[name].append(ways[name]())
        scheme = job.plan.routes[0].scheme
    took = {name: statistics.median(each[WARM:]) for name, each in times.items()}
    ratios = [ours / theirs for ours, theirs in zip(times["jax"], times["torch"], strict=True)]
    ratio = statistics.median(ratios[WARM:])
    if job.rank == 0:
        print(f"{scheme}: torch {took['torch']:.4f} s, JAX {took['jax']:.4f} s, ratio {ratio:.3f}")
    if job.rank == 0 and args.json:
        report = {
            "machine": machine_facts(),
            "load_average": os.getloadavg(),
            "workers": job.world_size,
            "scheme": scheme,
            "mbytes": args.mbytes,
            "tensors": len(sizes),
            "rounds": args.rounds,
            "torch_s": took["torch"],
            "jax_s": took["jax"],
            "ratio_of_medians": took["jax"] / took["torch"],
            "median_ratio_of_turns": ratio,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
