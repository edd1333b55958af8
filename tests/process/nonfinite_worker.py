"""Trains systems one after the other, a job each; rank 1 has one NaN in one gradient."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import digest
from telling import Told, tell_of_each
from torch import Tensor, nn

import slipstream
from slipstream.errors import CheckpointError, NonFiniteGradient, RuntimeFault

STEPS, BAD_STEP, BAD_RANK = 5, 2, 1
WORDS, INPUTS, WIDTH, OUTPUTS = 30, 12, 96, 4
LAYERS = ("words", "numbers")


class Net(nn.Module):
    """What is done to the gradient of one of the first two layers' outputs concerns that layer
    alone. The buffer is not finite from the start."""

    bound: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.numbers = nn.Linear(INPUTS, WIDTH)
        self.last = nn.Linear(WIDTH, OUTPUTS)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("bound", torch.full((3,), torch.inf))

    def forward(self, words: Tensor, numbers: Tensor, bad: str = "") -> Tensor:
        parts = {"words": self.words(words), "numbers": self.numbers(numbers)}
        if bad:
            parts[bad].register_hook(with_one_nan)
        result: Tensor = self.last(torch.tanh(self.norm(parts["words"] + parts["numbers"])))
        return result


def with_one_nan(gradient: Tensor) -> Tensor:
    changed = gradient.clone()
    changed[0, 3] = torch.nan
    return changed


def step_once(model: nn.Module, take: Any, rank: int, step: int, bad: str) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    words = torch.randint(0, WORDS, (8,), generator=generator)
    numbers = torch.randn(8, INPUTS, generator=generator)
    if (step, rank) != (BAD_STEP, BAD_RANK):
        bad = ""
    if bad == "inputs":
        numbers[0, 0] = torch.nan
    model.zero_grad()
    take(model(words, numbers, bad if bad in LAYERS else "").square().mean())


class Scaled:
    """A step of mixed precision."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def __call__(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()
        self.scaler.step(self._optimizer)
        self.scaler.update()


def plain(optimizer: Any) -> Callable[[Tensor], None]:
    def take(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()

    return take


def train(asked: Told, told: Told) -> None:
    torch.manual_seed(3)
    model: Any = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with slipstream.init(
            nonfinite=asked.get("nonfinite"), start_limit_s=60, wait_limit_s=60, silence_limit_s=10
        ) as job:
            model, optimizer = job.distribute(model, optimizer, asked["strategy"])
            take = Scaled(optimizer) if "scaled" in asked else plain(optimizer)
            if "save" in asked:
                job.save(f"{asked['save']}/kept")
                while not Path(asked["save"], "kept").exists():
                    time.sleep(0.01)  # in shared memory, where rank 0's call alone counts
            for step in range(STEPS):
                step_once(model, take, job.rank, step, asked["bad"])
            if "save" in asked:
                told["refusals"] = save_twice(job, model, asked["save"])
    told["warned"] = [str(one.message) for one in caught if "is not finite" in str(one.message)]
    if isinstance(take, Scaled):
        told["scale"] = take.scaler.get_scale()
    told["digest"] = digest(model)
    trained = [*model.parameters(), model.norm.running_mean]
    told["finite"] = all(bool(tensor.isfinite().all()) for tensor in trained)


def save_twice(job: slipstream.Job, model: Any, folder: str) -> list[str]:
    """Of weights that are not finite, over a finite checkpoint and beside it; what is refused."""
    while model.words.weight.isfinite().all():
        time.sleep(0.01)  # in shared memory, until rank 1 is there too
    refusals = []
    for name in ("kept", "other"):
        try:
            job.save(f"{folder}/{name}")
        except CheckpointError as error:
            refusals.append(str(error))
    return refusals


def train_or_stop(asked: Told, told: Told) -> None:
    try:
        train(asked, told)
    except RuntimeFault as error:
        told["fault"] = str(error)
        if isinstance(error, NonFiniteGradient):
            told["fields"] = [error.rank, error.tensor, error.step]


if __name__ == "__main__":
    if sys.argv[2:] == ["uncaught"]:
        (asked,) = json.loads(Path(sys.argv[1]).read_text())
        train(asked, {})
    else:
        tell_of_each(train_or_stop, sys.argv[1])
