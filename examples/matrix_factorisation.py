"""Matrix factorisation: predict a user's rating of an item as the product of two short vectors.

python examples/matrix_factorisation.py                                     one process
slipstream run --workers 4 --strategy "parameter_flow(delta='90%')" \
    examples/matrix_factorisation.py --data DIR

DIR holds a ratings.csv with columns userId, movieId and rating, as in the MovieLens data sets.
Without it ratings are generated. A batch contains few users and items, so most rows of both
matrices have no gradient in a step; strategies with a filter do not send these rows.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import slipstream
from slipstream.apps.bench.data import TensorExamples, read_ratings
from slipstream.apps.bench.data.generated import low_rank_ratings
from slipstream.apps.bench.models import Factorisation


def train_epoch(
    job: slipstream.Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: TensorExamples,
    batches: torch.utils.data.Sampler[list[int]],
) -> float:
    """Train on this worker's batches of one pass over the data; return their mean loss."""
    losses = []
    for rows in batches:
        pairs, ratings = examples.take(torch.tensor(rows))
        optimizer.zero_grad()
        loss = F.mse_loss(model(pairs), ratings)
        loss.backward()
        optimizer.step()
        job.record(loss=loss, samples=len(rows))
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def root_mean_square_error(model: nn.Module, examples: TensorExamples) -> float:
    pairs, ratings = examples.take(torch.arange(len(examples)))
    return float(F.mse_loss(model(pairs), ratings).sqrt())


def train(args: argparse.Namespace) -> None:
    with slipstream.init() as job:
        ratings = low_rank_ratings() if args.data is None else read_ratings(args.data)
        split = ratings.split()
        mean = float(split.train.targets.mean())
        torch.manual_seed(0)
        model: nn.Module = Factorisation(ratings.users, ratings.items, args.rank, mean)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=args.lr, weight_decay=args.weight_decay
        )
        model, optimizer = job.distribute(model, optimizer)
        batches = job.sampler(split.train, args.batch)
        for epoch in range(1, args.epochs + 1):
            loss = train_epoch(job, model, optimizer, split.train, batches)
            if job.rank == 0:
                error = root_mean_square_error(model, split.test)
                job.record(rmse=error)
                print(f"epoch {epoch}: loss {loss:.4f}, rmse {error:.4f}", flush=True)
    if job.summary is not None:  # rank 0 has it
        steps, sent = job.summary["steps"], job.summary["bytes"]["sent"]
        size = f"{ratings.users} users, {ratings.items} items"
        print(f"{size}, {steps} steps, {sent / 1e6:.2f} MB sent")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="with a ratings.csv")
    parser.add_argument("--rank", type=int, default=32, help="numbers per user and item")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256, help="ratings per step and worker")
    # A batch rarely contains a row, and then gives it a small share of the mean: so lr is high.
    parser.add_argument("--lr", type=float, default=20.0)
    parser.add_argument("--weight-decay", type=float, default=2e-4)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
