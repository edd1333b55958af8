"""Workloads with a learning task: time to a goal counts, not only time per step.

Each takes real data from a folder; without one, data is generated or comes with scikit-learn, and
the goal is different.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from slipstream.apps.bench.data import (
    Split,
    TensorExamples,
    encode_text,
    read_images,
    read_labelled_text,
    read_ratings,
    read_sparse_rows,
)
from slipstream.apps.bench.data.framed import Framed
from slipstream.apps.bench.data.generated import (
    coloured_images,
    digits,
    labelled_sentences,
    low_rank_ratings,
    separable_images,
    sparse_logistic,
)
from slipstream.apps.bench.models import (
    ALEXNET_SIDE,
    Factorisation,
    SparseLogistic,
    TextNet,
    alexnet_net,
    small_image_net,
)
from slipstream.apps.bench.workloads.protocol import Goal, Workload, sgd

FACTOR_RANK = 32


def mnist(*, data: Path | None = None) -> Workload:
    split = digits() if data is None else read_images(data)
    return _images("mnist", split, target=0.95 if data is None else 0.98)


def fashion(*, data: Path | None = None) -> Workload:
    split = separable_images() if data is None else read_images(data)
    return _images("fashion", split, target=0.9 if data is None else 0.85)


def _images(name: str, split: Split[TensorExamples], *, target: float) -> Workload:
    return Workload(
        name,
        f"image classification, {split.classes} classes: {split.origin}",
        16,
        partial(small_image_net, split.classes),
        split.train,
        F.cross_entropy,
        partial(sgd, lr=0.02, momentum=0.9),
        Goal("accuracy", target, True, split.test, _right),
    )


def alexnet(*, data: Path | None = None, scale: float = 1.0) -> Workload:
    split = coloured_images() if data is None else read_images(data)
    train, test = (Framed(part, ALEXNET_SIDE) for part in (split.train, split.test))
    return Workload(
        "alexnet",
        f"AlexNet's layers, {61.1 * scale:.4g}M, images {ALEXNET_SIDE} wide: {split.origin}",
        16,
        partial(alexnet_net, scale, classes=split.classes),
        train,
        F.cross_entropy,
        partial(sgd, lr=0.01, momentum=0.9),
        Goal("accuracy", 0.9 if data is None else 0.8, True, test, _right),
    )


def lr(*, data: Path | None = None) -> Workload:
    split = sparse_logistic() if data is None else read_sparse_rows(data)
    features = split.train.features
    return Workload(
        "lr",
        f"sparse logistic regression, {features} features: {split.origin}",
        128,
        partial(SparseLogistic, features),
        split.train,
        F.binary_cross_entropy_with_logits,
        partial(sgd, lr=0.5, momentum=0.0),
        Goal("accuracy", 0.74 if data is None else 0.845, True, split.test, _right_side),
    )


def mf(*, data: Path | None = None) -> Workload:
    ratings = low_rank_ratings() if data is None else read_ratings(data)
    split = ratings.split()
    size = (ratings.users, ratings.items)
    return Workload(
        "mf",
        f"matrix factorisation, {size[0]} by {size[1]}, rank {FACTOR_RANK}: {split.origin}",
        256,
        partial(Factorisation, *size, FACTOR_RANK, float(ratings.values.mean())),
        split.train,
        F.mse_loss,
        # A batch rarely contains a row, and then gives it a small share of the mean.
        partial(sgd, lr=20.0, momentum=0.0, weight_decay=5e-5),
        Goal("rmse", 0.4 if data is None else 0.9, False, split.test, _squared_error, _root),
    )


def text(*, data: Path | None = None) -> Workload:
    source = labelled_sentences() if data is None else read_labelled_text(data)
    encoded = encode_text(source)
    split = encoded.split
    return Workload(
        "text",
        f"text classification, {split.classes} classes, {encoded.words} words: {split.origin}",
        4,
        partial(TextNet, encoded.words, split.classes),
        split.train,
        F.cross_entropy,
        partial(sgd, lr=0.05, momentum=0.9),
        Goal("accuracy", 0.95 if data is None else 0.7, True, split.test, _right),
    )


def _right(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.argmax(1) == targets


def _right_side(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs > 0) == (targets > 0.5)


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def _root(mean: float) -> float:
    return float(mean**0.5)
