"""The cost of stale gradients: test error against staleness, in one process on one core.

python examples/staleness.py --data DIR --json staleness.json --plot staleness.png

DIR holds the files of MNIST or Fashion-MNIST (train-images-idx3-ubyte.gz and so on). The net and
its training are a small version of "Revisiting Distributed Synchronous SGD" (section 2.1, A.1):
3 × 3 convolutions with weight normalisation, SGD, a learning rate that falls to 0 in the end, error
measured on averaged weights. Staleness grows over the first fifth of training. Gradients are
clipped as in the paper's asynchronous training, so that runs do not diverge; the clipping is the
same for every staleness, so that runs differ in nothing else.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from slipstream.apps.bench.comparison import machine_facts
from slipstream.apps.bench.data import Split, TensorExamples, read_images
from slipstream.apps.studies.simulated_staleness import simulated_staleness


@dataclass(frozen=True)
class Recipe:
    """One training."""

    staleness: int
    seed: int
    steps: int
    lr: float = 0.1
    largest_norm: float = 1.0
    batch: int = 32
    averaging: float = 0.999

    @property
    def ramp_up(self) -> int:
        return self.steps // 5

    def rate_factor(self, step: int) -> float:
        """1, then linearly down to 0 over the last 40% of training (the paper: 10 of 25 epochs)."""
        return min(1.0, (self.steps - step) / (0.4 * self.steps))


@dataclass(frozen=True)
class Outcome:
    recipe: Recipe
    error: float  # of the test images, as a share
    last_loss: float  # of the last batch


def small_net(classes: int) -> nn.Sequential:
    """Three convolutions and a matrix: 5,000 parameters."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16), (16, 16)):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        layers += [weight_norm(convolution), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), weight_norm(nn.Linear(16 * 3 * 3, classes)))


def train(split: Split[TensorExamples], recipe: Recipe) -> Outcome:
    torch.manual_seed(recipe.seed)
    model = small_net(split.classes)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.averaging))
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr)
    schedule = LambdaLR(optimizer, recipe.rate_factor)
    with simulated_staleness(optimizer, steps=recipe.staleness, ramp_up=recipe.ramp_up):
        for _ in range(recipe.steps):
            images, labels = split.train.take(torch.randint(len(split.train), (recipe.batch,)))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.largest_norm)
            optimizer.step()
            schedule.step()
            averaged.update_parameters(model)
    return Outcome(recipe, share_wrong(averaged, split.test), loss.item())


@torch.no_grad()
def share_wrong(model: nn.Module, examples: TensorExamples) -> float:
    wrong = 0
    for rows in torch.arange(len(examples)).split(1000):
        images, labels = examples.take(rows)
        wrong += int((model(images).argmax(1) != labels).sum())
    return wrong / len(examples)


def by_staleness(outcomes: Sequence[Outcome]) -> dict[int, list[float]]:
    """Each staleness's errors, in percent, one for each seed."""
    errors: dict[int, list[float]] = {}
    for outcome in outcomes:
        errors.setdefault(outcome.recipe.staleness, []).append(100 * outcome.error)
    return dict(sorted(errors.items()))


def draw(errors: dict[int, list[float]], file: Path, title: str) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import ScalarFormatter

    figure, axis = plt.subplots(figsize=(6.0, 3.8), layout="constrained")
    points = [(staleness, error) for staleness, seeds in errors.items() for error in seeds]
    axis.scatter(*zip(*points, strict=True), s=18, color="#4878a8", label="a seed each", zorder=3)
    means = [mean(seeds) for seeds in errors.values()]
    axis.plot(list(errors), means, color="#222222", label="mean")
    axis.set_yscale("log")
    for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        formatter(ScalarFormatter())
    axis.set_xticks(list(errors))
    axis.set_xlabel("staleness: how many steps old a gradient is when it is applied")
    axis.set_ylabel("test error, %")
    axis.set_title(title, fontsize=10)
    axis.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 5, 10, 20, 40])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--steps", type=int, default=4000, help="of each run")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--largest-norm", type=float, default=1.0, help="of a gradient; or inf")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="needs slipstream[bench]")
    args = parser.parse_args()
    torch.set_num_threads(1)
    split = read_images(args.data)
    outcomes = []
    for seed in range(args.seeds):
        for staleness in args.staleness:
            recipe = Recipe(staleness, seed, args.steps, args.lr, args.largest_norm)
            outcomes.append(train(split, recipe))
            print(f"seed {seed}, staleness {staleness}: {outcomes[-1].error:.2%} wrong", flush=True)
    errors = by_staleness(outcomes)
    for staleness, seeds in errors.items():
        print(f"staleness {staleness:3}: {mean(seeds):.2f}% ({min(seeds):.2f} to {max(seeds):.2f})")
    if args.json:
        report = {"machine": machine_facts(), "outcomes": [asdict(one) for one in outcomes]}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        title = f"{args.data.name}: {args.steps} steps at rate {args.lr:g}, seeds: {args.seeds}"
        draw(errors, args.plot, title)


if __name__ == "__main__":
    main()
