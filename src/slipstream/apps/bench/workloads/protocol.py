"""The interface of a workload: a model, examples, a loss, an optimizer, optionally a goal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from slipstream.apps.bench.data import Batch, Examples
from slipstream.errors import ConfigError

EVALUATED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Goal:
    """The metric of a trained model, and its target.

    ``measure`` gives one number per row; the metric is ``finish`` of their mean.
    """

    metric: str
    target: float
    higher_is_better: bool
    test: Examples
    measure: Callable[[Tensor, Tensor], Tensor]
    finish: Callable[[float], float] = float

    def evaluate(self, model: nn.Module) -> float:
        """Return the metric over all test rows; the model's mode does not change."""
        training = model.training
        model.eval()
        total = 0.0
        with torch.no_grad():
            for indices in torch.arange(len(self.test)).split(EVALUATED_AT_ONCE):
                inputs, targets = self.test.take(indices)
                total += float(self.measure(model(inputs), targets).sum())
        model.train(training)
        return self.finish(total / len(self.test))

    def at(self, target: float) -> Goal:
        """Return the same goal with another target."""
        return replace(self, target=target)

    def reached(self, value: float) -> bool:
        return value >= self.target if self.higher_is_better else value <= self.target


@dataclass(frozen=True, slots=True)
class Workload:
    """A model to train with its data. ``batch`` is the default of each worker's rows per step.

    ``rows_per_sample`` is the number of rows that a sample gives each linear layer: a text has one
    per character.
    """

    name: str
    what: str
    batch: int
    model: Callable[[], nn.Module]
    examples: Examples
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    goal: Goal | None = None
    rows_per_sample: int = 1

    def batches(self, rank: int, world: int, batch: int, seed: int) -> Iterator[Batch]:
        """Yield one worker's rows of every step, for ever; ``batch`` counts those of all workers.

        All workers' rows together depend on the batch and the seed, not on the number of workers.
        Epochs are shuffled, and rows that do not fill a batch are left out.
        """
        self._check(rank, world, batch)
        steps = _steps(len(self.examples), batch, seed)
        return (self.examples.take(rows[rank::world]) for rows in steps)

    def _check(self, rank: int, world: int, batch: int) -> None:
        if not 0 <= rank < world:
            raise ConfigError(f"rank {rank} of {world} workers; ranks are 0 to {world - 1}")
        if batch < 1 or batch % world:
            # Equal shares make the mean of the workers' losses the loss of the whole batch.
            even = max(1, -(-batch // world)) * world
            raise ConfigError(
                f"a batch of {batch} cannot be dealt evenly to {world} workers; take {even}"
            )
        if batch > len(self.examples):
            raise ConfigError(
                f"a batch of {batch} is more than the {len(self.examples)} rows of {self.name}; "
                "take a smaller batch, or more data"
            )

    def evaluate(self, model: nn.Module) -> float:
        if self.goal is None:
            raise ConfigError(
                f"{self.name} only measures steps; to measure learning take one of mnist, "
                "fashion, lr, mf, alexnet, text, gpt, recommender"
            )
        return self.goal.evaluate(model)


def _steps(rows: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield the rows of each step of all workers together."""
    for epoch in itertools.count():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(rows, generator=generator)
        yield from order[: rows // batch * batch].split(batch)


def sgd(
    model: nn.Module, *, lr: float, momentum: float, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)


def adamw(model: nn.Module, *, lr: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
