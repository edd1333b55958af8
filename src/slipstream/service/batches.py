"""Rows of training data as batches of tensors, and which rows are held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.service.features import UNKNOWN, Encoded, Encoder
from slipstream.service.rows import Rows
from slipstream.service.settings import TextSetting

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # what the net's forward takes


class Examples:
    """The rows of training data, encoded.

    Batches are filled by numpy: on batches of 2, torch's own operations take three times as long.
    """

    def __init__(self, rows: Rows, encoder: Encoder) -> None:
        self._encoded = [encoder.encode(text) for text in rows.texts]
        self._setting = encoder.setting
        self._widest = max(encoder.setting.windows)
        self._rows = rows

    def targets(self, numbers: Sequence[int]) -> Tensor:
        """Shares of the classes, a row each: 1/k for each of k."""
        targets = np.zeros((len(numbers), len(self._rows.labels)), np.float32)
        for row, number in enumerate(numbers):
            own = self._rows.classes[number]
            for place in own:
                targets[row, place] = 1 / len(own)
        return torch.from_numpy(targets)

    def batch(self, numbers: Sequence[int], rng: np.random.Generator | None = None) -> Batch:
        """Tensors of some rows; with a generator, words and features are dropped for training."""
        some = [self._encoded[number] for number in numbers]
        if rng is not None:
            some = [drop(own, self._setting, rng) for own in some]
        return (
            _padded([own.words for own in some], self._widest),
            torch.from_numpy(np.array([max(len(own.words), self._widest) for own in some])),
            _padded([own.features for own in some], 1),
            _padded([own.values for own in some], 1),
        )


def drop(encoded: Encoded, setting: TextSetting, rng: np.random.Generator) -> Encoded:
    """Some words become unknown; some features are left out, and the others count for them.

    >>> text = Encoded(np.arange(2, 9), np.arange(1, 9), np.ones(8, np.float32))
    >>> fewer = drop(text, TextSetting(feature_dropout=0.5), np.random.default_rng(0))
    >>> len(fewer.features) < 8, set(fewer.values.tolist())
    (True, {2.0})
    """
    chance = rng.random(len(encoded.words) + len(encoded.features), np.float32)
    words = encoded.words.copy()
    words[chance[: len(words)] < setting.word_dropout] = UNKNOWN
    keep = chance[len(words) :] >= setting.feature_dropout
    scale = np.float32(1 / (1 - setting.feature_dropout))
    return Encoded(words, encoded.features[keep], encoded.values[keep] * scale)


def _padded(rows: Sequence[np.ndarray], least: int) -> Tensor:
    """Rows as one tensor, with 0 up to the longest, and at least ``least`` wide."""
    padded = np.zeros((len(rows), max(least, *map(len, rows))), rows[0].dtype)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(padded)


def shuffled(numbers: Sequence[int], batch: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Batches without end: every row once, in random order, then again.

    >>> batches = shuffled([1, 2, 3], 2, np.random.default_rng(0))
    >>> sorted(next(batches) + next(batches) + next(batches))
    [1, 1, 2, 2, 3, 3]
    """
    waiting: list[int] = []
    while True:
        while len(waiting) < batch:
            waiting += rng.permutation(numbers).tolist()
        yield waiting[:batch]
        del waiting[:batch]


def hold_out(classes: Sequence[list[int]], setting: TextSetting, seed: int) -> list[int]:
    """Numbers of the rows to hold out: a share of each class, never a class's last row.

    >>> classes = [[0]] * 70 + [[1]] * 29 + [[2]]
    >>> held = hold_out(classes, TextSetting(), 0)
    >>> len(held), sum(number < 70 for number in held)
    (10, 7)
    """
    if len(classes) < setting.least_held_from:
        return []
    left = Counter(own for row in classes for own in row)
    by_class: dict[int, list[int]] = {own: [] for own in sorted(left)}
    for number in np.random.default_rng([seed, 1]).permutation(len(classes)).tolist():
        by_class[classes[number][0]].append(number)
    held: list[int] = []
    due = 0.5  # rounds the sum over classes, so that small classes count together
    for numbers in by_class.values():
        due += setting.held_out * len(numbers)
        for number in numbers:
            if due < 1 or any(left[own] < 2 for own in classes[number]):
                break
            held.append(number)
            left.subtract(classes[number])
            due -= 1
        due = min(due, 1.0)  # what a class could not give is not asked of the next
    return sorted(held)
