"""Data that needs no file: packaged, or drawn from a seed. The same seed gives the same data."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.apps.bench.data.examples import SparseExamples, Split, TensorExamples, split_off
from slipstream.apps.bench.data.labelled_text import LabelledText, Sentence
from slipstream.apps.bench.data.rated_items import genre_rows
from slipstream.apps.bench.data.ratings import Ratings
from slipstream.errors import ConfigError

TEST_SHARE = 0.2
CHANNELS = 3
DRAWN_AT_ONCE = 500


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def digits(*, size: int = 28, seed: int = 0) -> Split[TensorExamples]:
    """Return scikit-learn's 1,797 handwritten digits, enlarged; a random fifth is for the test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "digits come with scikit-learn: pip install 'slipstream[train]', or give real data"
        ) from error
    data = load_digits()
    small = torch.from_numpy(data.images).float().div_(16).unsqueeze(1)
    images = F.interpolate(small, size=(size, size), mode="bilinear", align_corners=False)
    targets = torch.from_numpy(data.target).long()
    train, test = (
        TensorExamples(images[part], targets[part])
        for part in split_off(len(targets), TEST_SHARE, seed)
    )
    return Split(train, test, 10, origin="scikit-learn's digits, enlarged")


def separable_images(
    *, count: int = 6000, classes: int = 10, size: int = 28, noise: float = 4.0, seed: int = 0
) -> Split[TensorExamples]:
    """Generate images: each is its class's smooth pattern, with noise."""
    generator = seeded(seed)
    coarse = torch.randn(classes, 1, 7, 7, generator=generator)
    patterns = F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)
    targets = torch.arange(count) % classes
    normal = torch.randn(count, 1, size, size, generator=generator)
    images = patterns[targets] + noise * normal
    train, test = (
        TensorExamples(images[part], targets[part]) for part in split_off(count, TEST_SHARE, seed)
    )
    return Split(train, test, classes, origin="generated images")


def coloured_images(
    *,
    count: int = 4000,
    classes: int = 10,
    size: int = 63,
    shift: int = 15,
    noise: float = 2.5,
    seed: int = 0,
) -> Split[TensorExamples]:
    """Generate colour images: each is its class's smooth pattern, shifted, with noise."""
    generator = seeded(seed)
    coarse = torch.randn(classes, CHANNELS, 9, 9, generator=generator)
    patterns = F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)
    targets = torch.arange(count) % classes
    # In parts, since as numbers they take four times the memory of their bytes.
    parts = targets.split(DRAWN_AT_ONCE)
    images = torch.cat([_shifted(patterns[part], shift, noise, generator) for part in parts])
    train, test = (
        TensorExamples(images[part], targets[part]) for part in split_off(count, TEST_SHARE, seed)
    )
    return Split(train, test, classes, origin="generated colour images")


def _shifted(patterns: Tensor, shift: int, noise: float, generator: torch.Generator) -> Tensor:
    """Return patterns as bytes, each with a random cyclic shift."""
    count, channels, size, _ = patterns.shape
    moves = torch.randint(-shift, shift + 1, (2, count, 1), generator=generator)
    rows, columns = (torch.arange(size) + moves).remainder(size)
    image, channel = torch.arange(count), torch.arange(channels)
    shifted = patterns[
        image[:, None, None, None],
        channel[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
    noisy = shifted + noise * torch.randn(shifted.shape, generator=generator)
    # Three standard deviations either way are within a byte.
    contrast = 127 / (3 * math.sqrt(1 + noise**2))
    return (128 + contrast * noisy).clamp_(0, 255).byte()


def random_rows(
    shape: tuple[int, ...], *, classes: int, count: int = 64, seed: int = 0
) -> TensorExamples:
    """Return inputs and targets without any meaning, for measuring steps."""
    generator = seeded(seed)
    inputs = torch.randn(count, *shape, generator=generator)
    return TensorExamples(inputs, torch.randint(classes, (count,), generator=generator))


def sparse_logistic(
    *, count: int = 20_000, features: int = 100_000, entries: int = 30, seed: int = 0
) -> Split[SparseExamples]:
    """Generate rows of few features, some common and most rare; labels by a logistic model."""
    generator = seeded(seed)
    weights = torch.randn(features, generator=generator) * 3 / math.sqrt(entries)
    # Uniform in the logarithm: feature i occurs about 1/i as often as the first.
    exponents = torch.rand(count, entries, generator=generator)
    indices = (features**exponents).long().sub_(1).clamp_(0, features - 1)
    values = torch.ones(count, entries)
    logits = weights[indices].sum(1)
    targets = (torch.rand(count, generator=generator) < torch.sigmoid(logits)).float()
    train, test = (
        _sparse(indices[part], values[part], targets[part], features)
        for part in split_off(count, TEST_SHARE, seed)
    )
    return Split(train, test, 1, origin="generated sparse rows")


def _sparse(indices: Tensor, values: Tensor, targets: Tensor, features: int) -> SparseExamples:
    rows, entries = indices.shape
    offsets = torch.arange(rows + 1) * entries
    return SparseExamples(indices.flatten(), values.flatten(), offsets, targets, features)


def low_rank_ratings(
    *, users: int = 1000, items: int = 1500, rank: int = 4, count: int = 200_000, seed: int = 0
) -> Ratings:
    """Generate ratings from 0.5 to 5 by a product of two thin matrices, rounded to halves."""
    generator = seeded(seed)
    tastes = torch.randn(users, rank, generator=generator)
    traits = torch.randn(items, rank, generator=generator)
    return _rated(tastes, traits, count, generator)


def _rated(tastes: Tensor, traits: Tensor, count: int, generator: torch.Generator) -> Ratings:
    (users, rank), items = tastes.shape, len(traits)
    pairs = torch.stack(
        [torch.randint(n, (count,), generator=generator) for n in (users, items)], dim=1
    )
    product = (tastes[pairs[:, 0]] * traits[pairs[:, 1]]).sum(1) / math.sqrt(rank)
    error = 0.2 * torch.randn(count, generator=generator)
    values = (3.0 + product + error).mul_(2).round_().div_(2).clamp_(0.5, 5)
    return Ratings(pairs, values, users, items, origin="generated ratings")


def ratings_by_genre(
    *,
    users: int = 600,
    items: int = 900,
    genres: int = 12,
    rank: int = 4,
    count: int = 60_000,
    seed: int = 0,
) -> tuple[Ratings, SparseExamples]:
    """Generate such ratings, of items with one to three genres, which are half of their traits."""
    generator = seeded(seed)
    lengths = torch.randint(1, 4, (items,), generator=generator)
    numbers = torch.rand(items, genres, generator=generator).argsort(1)[:, :3].tolist()
    of = [
        [f"genre{g:02d}" for g in row[:n]] for row, n in zip(numbers, lengths.tolist(), strict=True)
    ]
    rows = genre_rows(of)
    bags, _ = rows.take(torch.arange(items))
    kinds = torch.randn(rows.features, rank, generator=generator)
    shared = F.embedding_bag(bags.indices, kinds, bags.offsets, mode="mean")
    traits = shared + 0.5 * torch.randn(items, rank, generator=generator)
    tastes = torch.randn(users, rank, generator=generator)
    return _rated(tastes, traits, count, generator), rows


def labelled_sentences(
    *, count: int = 4000, classes: int = 10, vocabulary: int = 8000, seed: int = 0
) -> LabelledText:
    """Generate sentences of common words with three or four of their class's own words."""
    generator = seeded(seed)

    def draw(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    def sentence(label: int) -> Sentence:
        exponents = torch.rand(6 + draw(10), generator=generator)
        text = [f"w{number}" for number in (vocabulary**exponents).long().tolist()]
        for _ in range(3 + draw(2)):
            text.insert(draw(len(text) + 1), f"c{label}x{draw(8)}")
        return " ".join(text), f"class{label:03d}"

    sentences = tuple(sentence(index % classes) for index in range(count))
    return LabelledText(sentences, (), origin="generated sentences")
