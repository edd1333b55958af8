"""Sparse logistic regression: a row has few features, so a step changes few of many weights.

python examples/logistic_regression.py                                      one process
slipstream run --workers 4 --strategy "parameter_flow(delta='90%')" \
    examples/logistic_regression.py --data DIR

DIR holds files in LIBSVM's format, such as a9a: one to train on and optionally NAME.t to test on.
Without it rows are generated. Any strategy works: dense strategies send every weight's gradient in
every step; those with a filter send only entries that have accumulated to a large enough value.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import slipstream
from slipstream.apps.bench.data import SparseExamples, read_sparse_rows
from slipstream.apps.bench.data.generated import sparse_logistic
from slipstream.apps.bench.models import SparseLogistic


def train_epoch(
    job: slipstream.Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: SparseExamples,
    batches: torch.utils.data.Sampler[list[int]],
) -> float:
    """Train on this worker's batches of one pass over the data; return their mean loss."""
    losses = []
    for rows in batches:
        features, labels = examples.take(torch.tensor(rows))
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(features), labels)
        loss.backward()
        optimizer.step()
        job.record(loss=loss, samples=len(rows))
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def share_right(model: nn.Module, examples: SparseExamples) -> float:
    features, labels = examples.take(torch.arange(len(examples)))
    return float(((model(features) > 0) == (labels > 0.5)).float().mean())


def train(args: argparse.Namespace) -> None:
    with slipstream.init() as job:
        split = sparse_logistic() if args.data is None else read_sparse_rows(args.data)
        model: nn.Module = SparseLogistic(split.train.features)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
        model, optimizer = job.distribute(model, optimizer)
        batches = job.sampler(split.train, args.batch)
        for epoch in range(1, args.epochs + 1):
            loss = train_epoch(job, model, optimizer, split.train, batches)
            if job.rank == 0:
                accuracy = share_right(model, split.test)
                job.record(accuracy=accuracy)
                print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.2%}", flush=True)
    if job.summary is not None:  # rank 0 has it
        steps, sent = job.summary["steps"], job.summary["bytes"]["sent"]
        print(f"{split.train.features} features, {steps} steps, {sent / 1e6:.2f} MB sent")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="files in LIBSVM's format")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128, help="rows per step and worker")
    parser.add_argument("--lr", type=float, default=0.5)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
