"""The program that ``slipstream train digits`` runs on every worker.

The loop is an ordinary one; slipstream is in two lines of ``train``. All workers draw the same
order of samples, and each takes its own part of every batch, so that the whole batch does
not depend on the number of workers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from torch import Tensor, nn

import slipstream
from slipstream.apps.cli.summary import summary_table

TEST_SAMPLES = 360


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of the training, independent of the strategy."""

    epochs: int
    batch: int
    lr: float
    seed: int


@dataclass(frozen=True, slots=True)
class Digits:
    """1,797 handwritten digits of 8 x 8 pixels; a fixed random fifth, put last, is for the test.

    The same people wrote both parts (the data's own order would separate them, and cost three
    points of accuracy): this shows that training works; it is not a benchmark of the model.
    """

    images: Tensor
    labels: Tensor

    @classmethod
    def load(cls) -> Digits:
        data = load_digits()
        images = torch.from_numpy(data.images).float().div_(16).unsqueeze(1)
        labels = torch.from_numpy(data.target).long()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        return cls(images[order], labels[order])

    @property
    def train_samples(self) -> int:
        return len(self.labels) - TEST_SAMPLES

    def shards(
        self, recipe: Recipe, epoch: int, rank: int, workers: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this worker's part of every whole batch of the epoch."""
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch)
        order = torch.randperm(self.train_samples, generator=generator)
        for end in range(recipe.batch, len(order) + 1, recipe.batch):
            rows = order[end - recipe.batch : end][rank::workers]
            yield self.images[rows], self.labels[rows]

    def accuracy(self, model: nn.Module) -> float:
        """Return the accuracy on the test samples; if weights are equal, one worker is enough."""
        with torch.no_grad():
            guess = model(self.images[-TEST_SAMPLES:]).argmax(dim=1)
        return float((guess == self.labels[-TEST_SAMPLES:]).float().mean())


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(recipe: Recipe) -> None:
    digits = Digits.load()
    steps = recipe.epochs * (digits.train_samples // recipe.batch)
    with slipstream.init() as job, progress(job.rank) as bar:
        torch.manual_seed(recipe.seed)
        model = network()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=recipe.lr, momentum=0.9, weight_decay=1e-4
        )
        model, optimizer = job.distribute(model, optimizer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=steps)
        task = bar.add_task("training", total=steps, loss=0.0, accuracy=0.0)
        for epoch in range(recipe.epochs):
            for images, labels in digits.shards(recipe, epoch, job.rank, job.world_size):
                optimizer.zero_grad()
                # Not the mean over this worker's samples: shards may differ by one sample, and
                # the mean over workers has to be the mean over the whole batch.
                total = F.cross_entropy(model(images), labels, reduction="sum")
                loss = total * job.world_size / recipe.batch
                loss.backward()
                optimizer.step()
                scheduler.step()
                job.record(loss=loss.item(), samples=len(labels))
                bar.update(task, advance=1, loss=loss.item())
            if job.rank == 0:
                accuracy = digits.accuracy(model)
                job.record(accuracy=accuracy)
                bar.update(task, accuracy=accuracy)
    if job.summary is not None:
        Console().print(summary_table(job.summary))


def progress(rank: int) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}"),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("accuracy {task.fields[accuracy]:.1%}"),
        TimeRemainingColumn(),
        disable=rank != 0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Started by `slipstream train digits`.")
    for name, kind in (("epochs", int), ("batch", int), ("lr", float), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    train(Recipe(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
