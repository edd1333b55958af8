"""Rows of training data as batches of tensors, and which rows are held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.service.features import UNKNOWN, Encoded, Encoder, Ids
from slipstream.service.rows import Rows
from slipstream.service.settings import TextSetting

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # what the net's forward takes


class Examples:
    """Encoded rows.

    Args:
        rows: The training data.
        encoder: Its words and features.
    """

    def __init__(self, rows: Rows, encoder: Encoder) -> None:
        self._encoded = [encoder.encode(text) for text in rows.texts]
        self._setting = encoder.setting
        self.classes, self.labels = rows.classes, rows.labels

    def targets(self, numbers: Sequence[int]) -> Tensor:
        """Shares of the classes, a row each: 1/k for each of k."""
        targets = torch.zeros(len(numbers), len(self.labels))
        for row, number in enumerate(numbers):
            own = self.classes[number]
            targets[row, own] = 1 / len(own)
        return targets

    def batch(self, numbers: Sequence[int], rng: np.random.Generator | None = None) -> Batch:
        """Tensors of some rows; with a generator, words and features are dropped for training."""
        encoded = [self._encoded[number] for number in numbers]
        if rng is not None:
            encoded = [drop(own, self._setting, rng) for own in encoded]
        return pad(encoded, max(self._setting.windows))


def drop(encoded: Encoded, setting: TextSetting, rng: np.random.Generator) -> Encoded:
    """Some words become unknown; some features are left out, and the others count for them.

    >>> text = Encoded(np.arange(2, 9), np.arange(1, 9), np.ones(8, np.float32))
    >>> fewer = drop(text, TextSetting(feature_dropout=0.5), np.random.default_rng(0))
    >>> len(fewer.features) < 8, set(fewer.values.tolist())
    (True, {2.0})
    """
    unknown = rng.random(len(encoded.words)) < setting.word_dropout
    keep = rng.random(len(encoded.features)) >= setting.feature_dropout
    scale = np.float32(1 / (1 - setting.feature_dropout))
    return Encoded(
        np.where(unknown, UNKNOWN, encoded.words),
        encoded.features[keep],
        encoded.values[keep] * scale,
    )


def pad(encoded: Sequence[Encoded], widest: int) -> Batch:
    """Padded tensors; a text has at least as many words as the widest window.

    >>> words, lengths, _, _ = pad([Encoded(np.array([5]), np.array([1]), np.ones(1))], 4)
    >>> words.tolist(), lengths.tolist()
    ([[5, 0, 0, 0]], [4])
    """
    lengths = [max(len(own.words), widest) for own in encoded]
    most = max(1, *(len(own.features) for own in encoded)) if encoded else 1
    words = np.zeros((len(encoded), max(lengths)), np.int64)
    features = np.zeros((len(encoded), most), np.int64)
    values = np.zeros((len(encoded), most), np.float32)
    for row, own in enumerate(encoded):
        words[row, : len(own.words)] = own.words
        features[row, : len(own.features)] = own.features
        values[row, : len(own.values)] = own.values
    return (
        torch.from_numpy(words),
        torch.tensor(lengths),
        torch.from_numpy(features),
        torch.from_numpy(values),
    )


def shuffled(numbers: Sequence[int], batch: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Batches without end: every row once, in random order, then again.

    >>> batches = shuffled([1, 2, 3], 2, np.random.default_rng(0))
    >>> sorted(next(batches) + next(batches) + next(batches))
    [1, 1, 2, 2, 3, 3]
    """
    waiting: list[int] = []
    while True:
        while len(waiting) < batch:
            waiting += rng.permutation(np.asarray(numbers)).tolist()
        yield waiting[:batch]
        waiting = waiting[batch:]


def hold_out(classes: Sequence[list[int]], setting: TextSetting, seed: int) -> list[int]:
    """Numbers of the rows to hold out: a share of each class, never a class's last row.

    >>> classes = [[0]] * 70 + [[1]] * 29 + [[2]]
    >>> held = hold_out(classes, TextSetting(), 0)
    >>> len(held), sum(number < 70 for number in held)
    (10, 7)
    """
    if len(classes) < setting.least_held_from:
        return []
    order: Ids = np.random.default_rng([seed, 1]).permutation(len(classes))
    by_class: dict[int, list[int]] = {}
    for number in order.tolist():
        by_class.setdefault(classes[number][0], []).append(number)
    left = Counter(own for row in classes for own in row)
    held: list[int] = []
    due = 0.5  # rounds the sum over classes, so that small classes count together
    for _, numbers in sorted(by_class.items()):
        due += setting.held_out * len(numbers)
        for number in numbers:
            if due < 1 or any(left[own] < 2 for own in classes[number]):
                break
            held.append(number)
            left.subtract(classes[number])
            due -= 1
    return sorted(held)
