"""One worker of ``dense.py``: trains the model with one system and says how long the steps took.

It speaks lines of JSON: "ready" after warming up, then waits for a line; "done" with its times,
then waits for a line again, so that the link counters are read with nothing on the wire.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BATCH, IMAGE, CLASSES = 2, 16, 10
Step = Callable[[], None]


def conv_net() -> nn.Sequential:
    """9.7M parameters, all but 5,000 of them in convolutions."""

    def conv(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]

    return nn.Sequential(
        *conv(3, 64),
        nn.MaxPool2d(2),
        *conv(64, 512),
        nn.MaxPool2d(2),
        *(layer for _ in range(4) for layer in conv(512, 512)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, CLASSES),
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    drawn = [
        (
            torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator),
            torch.randint(CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(8)
    ]
    return itertools.cycle(drawn)


def loop_body(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Step:
    """The training loop's body, the same for every system."""
    data = batches(rank)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        x, y = next(data)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


@contextlib.contextmanager
def training(system: str, rank: int) -> Iterator[tuple[Step, Step]]:
    """A step of the loop under this system, and what waits until all of it has arrived."""
    torch.manual_seed(0)
    model = conv_net()
    if system == "local":
        yield loop_body(model, sgd(model), rank), lambda: None
    elif system == "ddp":
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        wrapped = DistributedDataParallel(model)
        yield loop_body(wrapped, sgd(wrapped), rank), lambda: None
        dist.destroy_process_group()
    else:
        import slipstream

        with slipstream.init() as job:
            yield loop_body(*job.distribute(model, sgd(model), system), rank), job.wait


def timed(step: Step, count: int) -> list[float]:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return times


def say(**content: object) -> None:
    print(json.dumps(content), flush=True)


def hear() -> None:
    if not sys.stdin.readline():
        raise SystemExit("the benchmark that started this worker is gone")


def member(system: str, warmup: int, steps: int) -> None:
    with training(system, int(os.environ["RANK"])) as (step, finish):
        timed(step, warmup)
        finish()
        say(event="ready")
        hear()
        begun, used = time.perf_counter(), time.process_time()
        times = timed(step, steps)
        finish()
        say(
            event="done",
            elapsed_s=time.perf_counter() - begun,
            cpu_s=time.process_time() - used,
            steps_s=times,
        )
        hear()


def alone(strategy: str, warmup: int, steps: int) -> None:
    """The plain loop and a world of one, step by step in turns."""
    with training("local", 0) as (plain, _), training(strategy, 0) as (distributed, _):
        timed(plain, warmup)
        timed(distributed, warmup)
        say(event="ready")
        hear()
        times: dict[str, list[float]] = {"plain": [], "slipstream": []}
        turns = [("plain", plain), ("slipstream", distributed)]
        for _ in range(steps):
            turns.reverse()  # neither always comes after the other
            for name, step in turns:
                times[name] += timed(step, 1)
        say(event="done", **times)
        hear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system")
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--alone", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (alone if args.alone else member)(args.system, args.warmup, args.steps)


if __name__ == "__main__":
    main()
