"""AlexNet: most of its parameters are in three matrices, most of its computation is elsewhere.

python examples/alexnet.py                                                  one process
slipstream run --workers 4 --strategy "parameter_flow(delta='90%')" examples/alexnet.py --data DIR

DIR holds the files of MNIST or Fashion-MNIST (train-images-idx3-ubyte.gz and so on); small grey
images are enlarged and padded. Without it colour images are generated. ``--scale`` is the share
of AlexNet's 61.1M parameters that the net keeps: the default trains on a laptop's processor.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import slipstream
from slipstream.apps.bench.data import Examples, read_images
from slipstream.apps.bench.data.framed import Framed
from slipstream.apps.bench.data.generated import coloured_images
from slipstream.apps.bench.models import ALEXNET_SIDE, alexnet_net

EVALUATED_AT_ONCE = 500


def train_epoch(
    job: slipstream.Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    batches: torch.utils.data.Sampler[list[int]],
) -> float:
    """Train on this worker's batches of one pass over the data; return their mean loss."""
    losses = []
    for rows in batches:
        images, labels = examples.take(torch.tensor(rows))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        job.record(loss=loss, samples=len(rows))
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def share_right(model: nn.Module, examples: Examples) -> float:
    right = 0
    for rows in torch.arange(len(examples)).split(EVALUATED_AT_ONCE):
        images, labels = examples.take(rows)
        right += int((model(images).argmax(1) == labels).sum())
    return right / len(examples)


def train(args: argparse.Namespace) -> None:
    with slipstream.init() as job:
        split = coloured_images() if args.data is None else read_images(args.data)
        examples, test = (Framed(part, ALEXNET_SIDE) for part in (split.train, split.test))
        torch.manual_seed(0)
        model: nn.Module = alexnet_net(args.scale, classes=split.classes)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=args.lr, momentum=0.9
        )
        model, optimizer = job.distribute(model, optimizer)
        batches = job.sampler(examples, args.batch)
        for epoch in range(1, args.epochs + 1):
            loss = train_epoch(job, model, optimizer, examples, batches)
            if job.rank == 0:
                accuracy = share_right(model, test)
                job.record(accuracy=accuracy)
                print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.2%}", flush=True)
    if job.summary is not None:  # rank 0 has it
        steps, sent = job.summary["steps"], job.summary["bytes"]["sent"]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{parameters} parameters, {steps} steps, {sent / 1e6:.2f} MB sent")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="files in MNIST's format")
    parser.add_argument("--scale", type=float, default=1 / 64, help="share of parameters kept")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16, help="images per step and worker")
    parser.add_argument("--lr", type=float, default=0.01)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
