"""Rows of training data as batches, and which rows are held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from slipstream.service.features import FIRST_WORD, UNKNOWN, Encoded, Encoder, Values
from slipstream.service.net import TextBatch
from slipstream.service.rows import Rows
from slipstream.service.settings import TextSetting


class Examples:
    """The rows of training data, encoded."""

    def __init__(self, rows: Rows, encoder: Encoder) -> None:
        self._rows, self._encoder, self._setting = rows, encoder, encoder.setting
        self._encoded = [self._padded(encoder.encode(text)) for text in rows.texts]
        counts = np.bincount(np.concatenate([own.words for own in self._encoded]))
        rare = encoder.setting.rare_words
        self._dropped = (rare / (rare + np.maximum(counts, 1))).astype(np.float32)
        self._dropped[0] = 0.0  # padding stays

    def batch(self, numbers: Sequence[int], rng: np.random.Generator | None = None) -> TextBatch:
        """Some rows; with a generator, words, features and maps are dropped for training."""
        some = [self._encoded[number] for number in numbers]
        if rng is not None:
            some = [drop(own, self._dropped, self._setting.feature_dropout, rng) for own in some]
        return self._joined(some, numbers, rng)

    def held_batches(self, held: Sequence[int], size: int) -> list[TextBatch]:
        """Held-out rows as the net would meet new texts.

        Words and features that no other row has are unknown in them. They have weights all the
        same, because held-out rows are trained on later.
        """
        out = set(held)
        others = [own for number, own in enumerate(self._encoded) if number not in out]
        encode = restricted(self._encoder, others)
        some = [self._padded(encode(self._rows.texts[number])) for number in held]
        return [
            self._joined(some[start : start + size], held[start : start + size], None)
            for start in range(0, len(held), size)
        ]

    def _joined(
        self, some: list[Encoded], numbers: Sequence[int], rng: np.random.Generator | None
    ) -> TextBatch:
        return TextBatch(
            np.concatenate([own.words for own in some]),
            np.cumsum([len(own.words) for own in some]),
            np.concatenate([own.features for own in some]),
            np.concatenate([own.values for own in some]),
            np.cumsum([len(own.features) for own in some]),
            self._targets(numbers),
            self._kept(len(some), rng),
        )

    def _padded(self, encoded: Encoded) -> Encoded:
        missing = max(self._setting.windows) - len(encoded.words)
        return encoded._replace(words=np.pad(encoded.words, (0, max(missing, 0))))

    def _targets(self, numbers: Sequence[int]) -> Values:
        targets = np.zeros((len(numbers), len(self._rows.labels)), np.float32)
        for row, number in enumerate(numbers):
            own = self._rows.classes[number]
            for place in own:
                targets[row, place] = 1 / len(own)
        return targets

    def _kept(self, texts: int, rng: np.random.Generator | None) -> Values:
        shape = (texts, len(self._setting.windows) * self._setting.maps)
        if rng is None:
            return np.ones(shape, np.float32)
        kept = rng.random(shape, np.float32) >= self._setting.dropout
        return kept * np.float32(1 / (1 - self._setting.dropout))


def restricted(encoder: Encoder, rows: Sequence[Encoded]) -> Callable[[str], Encoded]:
    """Encodes texts with the words and features of some rows alone; numbers stay the encoder's.

    >>> encoder = Encoder.of(["red fish", "blue fish"], 2, TextSetting())
    >>> encode = restricted(encoder, [encoder.encode("red fish")])
    >>> encode("blue fish").words.tolist().count(UNKNOWN)
    1
    """
    words = np.unique(np.concatenate([own.words for own in rows]))
    words = words[words >= FIRST_WORD]
    features = np.unique(np.concatenate([own.features for own in rows]))
    numbers, at = np.concatenate([np.arange(FIRST_WORD), words]), features - 1
    known = Encoder(
        encoder.words[words - FIRST_WORD], encoder.features[at], encoder.idf[at], encoder.setting
    )

    def encode(text: str) -> Encoded:
        found = known.encode(text)
        return Encoded(numbers[found.words], features[found.features - 1], found.values)

    return encode


def drop(encoded: Encoded, words: Values, features: float, rng: np.random.Generator) -> Encoded:
    """Some words become unknown; some features are left out, and the others count for them.

    Args:
        words: For the number of each word, the probability to become unknown.
        features: The probability to leave out a feature.

    >>> text = Encoded(np.arange(2, 9), np.arange(1, 9), np.ones(8, np.float32))
    >>> fewer = drop(text, np.zeros(9, np.float32), 0.5, np.random.default_rng(0))
    >>> len(fewer.features) < 8, set(fewer.values.tolist()), fewer.words.tolist()
    (True, {2.0}, [2, 3, 4, 5, 6, 7, 8])
    """
    chance = rng.random(len(encoded.words) + len(encoded.features), np.float32)
    keep = chance[len(encoded.words) :] >= features
    return Encoded(
        np.where(chance[: len(encoded.words)] < words[encoded.words], UNKNOWN, encoded.words),
        encoded.features[keep],
        encoded.values[keep] * np.float32(1 / (1 - features)),
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
            if due < 1:
                break
            if any(left[own] < 2 for own in classes[number]):
                continue
            held.append(number)
            left.subtract(classes[number])
            due -= 1
        due = min(due, 1.0)  # what a class could not give is not asked of the next
    return sorted(held)
