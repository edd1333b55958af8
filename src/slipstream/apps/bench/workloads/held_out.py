"""Workloads evaluated by their loss on held-out data: text, and ratings."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from slipstream.apps.bench.data import read_characters, read_rated_items
from slipstream.apps.bench.data.generated import ratings_by_genre
from slipstream.apps.bench.data.markov import markov_text
from slipstream.apps.bench.data.rated_items import split_rated
from slipstream.apps.bench.models import Recommender
from slipstream.apps.bench.transformer import Gpt, check_sizes
from slipstream.apps.bench.workloads.protocol import Goal, Workload, adamw
from slipstream.errors import ConfigError

TEXT_TARGET = 2.0
RATINGS_TARGET, GENERATED_RATINGS_TARGET = 0.78, 0.2


def gpt(
    *,
    data: Path | None = None,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    context: int = 64,
    tied: int = 0,
) -> Workload:
    """Train a transformer that predicts the next character."""
    sizes = {"layers": layers, "width": width, "heads": heads, "context": context}
    check_sizes(**sizes)
    text = markov_text() if data is None else read_characters(data)
    split = text.split(context)
    model = partial(Gpt, split.classes, **sizes, tied=bool(tied))
    # No model gets below the entropy; a tenth above it, most of the structure is learnt.
    target = TEXT_TARGET if text.entropy is None else 1.1 * text.entropy
    return Workload(
        "gpt",
        f"character-level transformer, {layers} layers {width} wide, {heads} heads, context "
        f"{context}: {split.origin}",
        8,
        model,
        split.train,
        _next_character_loss,
        partial(adamw, lr=1e-3),
        Goal("loss", target, False, split.test, _row_loss),
        rows_per_sample=context,
    )


def recommender(*, data: Path | None = None, width: int = 32, hidden: int = 64) -> Workload:
    """Train embeddings of users, items and genres, with a small net on top of them."""
    for name, size in (("width", width), ("hidden", hidden)):
        if size < 1:
            raise ConfigError(f"recommender: {name}={size}; take at least 1")
    ratings, genres = ratings_by_genre() if data is None else read_rated_items(data)
    split = split_rated(ratings, genres)
    return Workload(
        "recommender",
        f"{ratings.users} users, {ratings.items} items, {genres.features} genres, embeddings "
        f"{width} wide: {split.origin}",
        128,
        partial(
            Recommender,
            *(ratings.users, ratings.items, genres.features),
            width=width,
            hidden=hidden,
            mean=float(ratings.values.mean()),
        ),
        split.train,
        F.mse_loss,
        partial(adamw, lr=2e-3, weight_decay=0.1),
        Goal(
            "loss",
            GENERATED_RATINGS_TARGET if data is None else RATINGS_TARGET,
            False,
            split.test,
            _squared_error,
        ),
    )


def _next_character_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _row_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return nats per character, the mean of each row."""
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()
