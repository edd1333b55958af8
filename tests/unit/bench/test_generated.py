from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.apps.bench.data import encode_text, generated
from slipstream.errors import ConfigError

MAKERS: dict[str, Callable[[int], torch.Tensor]] = {
    "images": lambda seed: generated.separable_images(count=50, seed=seed).train.inputs,
    "coloured": lambda seed: generated.coloured_images(count=50, seed=seed).train.inputs,
    "rows": lambda seed: generated.random_rows((4,), classes=3, seed=seed).inputs,
    "sparse": lambda seed: generated.sparse_logistic(count=50, seed=seed).train.indices,
    "ratings": lambda seed: generated.low_rank_ratings(count=50, seed=seed).values,
    "digits": lambda seed: generated.digits(seed=seed).train.targets,
    "text": lambda seed: (
        encode_text(generated.labelled_sentences(count=60, seed=seed)).split.train.inputs
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_same_seed_gives_the_same_data(make: Callable[[int], torch.Tensor]) -> None:
    assert torch.equal(make(3), make(3))
    other = make(4)
    assert make(3).shape != other.shape or not torch.equal(make(3), other)


def test_digits_are_enlarged_and_split() -> None:
    split = generated.digits()
    assert split.train.inputs.shape == (1438, 1, 28, 28)
    assert len(split.test) == 359
    assert 0 <= split.train.inputs.min() < split.train.inputs.max() <= 1


def test_coloured_images_show_their_class_moved() -> None:
    split = generated.coloured_images(count=600, classes=3, noise=0.0, shift=2, size=20)
    images, targets = split.train.inputs, split.train.targets
    assert images.shape == (480, 3, 20, 20)
    assert images.dtype == torch.uint8
    assert len(split.test) == 120
    for label in range(3):
        alike = images[targets == label]
        first = alike[0]
        moves = itertools.product(range(-4, 5), repeat=2)
        shifted = torch.stack([first.roll(move, (1, 2)) for move in moves])
        assert all((shifted == image).flatten(1).all(1).any() for image in alike)
        assert len(alike.unique(dim=0)) == 25  # five ways either way
        others = images[targets != label]
        assert not any((shifted == image).flatten(1).all(1).any() for image in others)


def test_noise_hides_but_does_not_saturate() -> None:
    images = generated.coloured_images(count=100).train.inputs
    assert 110 < float(images.float().mean()) < 146
    assert float(((images == 0) | (images == 255)).float().mean()) < 0.02


def test_without_scikit_learn_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"slipstream\[train\]"):
        generated.digits()


def test_sparse_rows_hold_common_and_rare_features() -> None:
    split = generated.sparse_logistic(count=2000, features=1000)
    counts = split.train.indices.bincount(minlength=1000)
    assert counts[0] > 50 * counts[500:].float().mean()
    assert int(split.train.indices.max()) < 1000
    assert 0.2 < float(split.train.targets.mean()) < 0.8


def test_ratings_are_halves_from_a_low_rank() -> None:
    ratings = generated.low_rank_ratings(users=40, items=60, count=5000)
    assert set((2 * ratings.values).tolist()) <= set(range(1, 11))
    assert ratings.pairs.max(0).values.tolist() == [39, 59]


def test_every_class_has_words_of_its_own() -> None:
    text: Any = generated.labelled_sentences(count=40, classes=4)
    for sentence, label in text.train:
        assert f"c{int(label.removeprefix('class'))}x" in sentence
