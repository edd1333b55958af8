"""Rows of training data as batches, and which rows are held out."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream._native import text_batch
from slipstream.apps.service.features import FIRST_WORD, UNKNOWN, Encoded, Encoder, Ids, Values
from slipstream.apps.service.net import TextBatch
from slipstream.apps.service.rows import Rows
from slipstream.apps.service.settings import TextSetting

Noise = npt.NDArray[np.uint64]  # one number: the state of a random generator


class Joined(NamedTuple):
    """Encoded rows, one after the other: row i ends at the i-th of the ends."""

    words: Ids
    word_ends: Ids
    features: Ids
    values: Values
    feature_ends: Ids
    classes: Ids
    class_ends: Ids

    @classmethod
    def of(cls, rows: Iterable[Encoded], classes: Sequence[list[int]]) -> Joined:
        """Join rows; ``classes`` has those of each."""
        # These grow in place: of all rows there is never a second copy.
        words, features, values = array("q"), array("q"), array("f")
        word_ends, feature_ends = [], []
        for row in rows:
            words.frombytes(row.words.tobytes())
            features.frombytes(row.features.tobytes())
            values.frombytes(row.values.tobytes())
            word_ends.append(len(words))
            feature_ends.append(len(features))
        return cls(
            _shared(words, np.int64),
            np.array(word_ends),
            _shared(features, np.int64),
            _shared(values, np.float32),
            np.array(feature_ends),
            np.array([label for own in classes for label in own]),
            np.cumsum([len(own) for own in classes]),
        )


def _shared(values: array[Any], kind: type[Any]) -> npt.NDArray[Any]:
    """The values as an array in the same memory."""
    # An empty array.array has an address that is not aligned, which native code refuses.
    return np.frombuffer(values, kind) if values else np.zeros(0, kind)


class Examples:
    """The rows of training data, encoded.

    Args:
        rows: Texts and their classes.
        encoder: Has the numbers of words and features.
        encode: Encodes a text; by default the encoder does.
        watch: Goes through the texts while they are encoded.
    """

    def __init__(
        self,
        rows: Rows,
        encoder: Encoder,
        encode: Callable[[str], Encoded] | None = None,
        watch: Callable[[list[str]], Iterable[str]] = iter,
    ) -> None:
        self._rows, self._encoder, self._setting = rows, encoder, encoder.setting
        encoded = map(encode or encoder.encode, watch(rows.texts))
        self._all = Joined.of(map(self._padded, encoded), rows.classes)
        self._words = np.diff(self._all.word_ends, prepend=0).tolist()
        self._features = np.diff(self._all.feature_ends, prepend=0).tolist()
        counts = np.bincount(self._all.words, minlength=len(encoder.words) + FIRST_WORD)
        rare = encoder.setting.rare_words
        self._dropped = (rare / (rare + np.maximum(counts, 1))).astype(np.float32)
        self._dropped[0] = 0.0  # padding stays

    def batch(self, numbers: Sequence[int], noise: Noise | None = None) -> TextBatch:
        """Some rows; with noise, words, features and maps are dropped for training."""
        texts, classes = len(numbers), len(self._rows.labels)
        words = sum([self._words[number] for number in numbers])
        features = sum([self._features[number] for number in numbers])
        batch = TextBatch(
            np.empty(words, np.int64),
            np.empty(texts, np.int64),
            np.empty(features, np.int64),
            np.empty(features, np.float32),
            np.empty(texts, np.int64),
            np.empty((texts, classes), np.float32),
            np.empty((texts, len(self._setting.windows) * self._setting.maps), np.float32),
        )
        rates = (self._setting.feature_dropout, self._setting.dropout)
        some, known = np.array(numbers, np.int64), self._dropped
        kept = text_batch(self._all, some, known, UNKNOWN, rates, classes, noise, batch)
        return batch._replace(features=batch.features[:kept], values=batch.values[:kept])

    def held_batches(self, held: Sequence[int], size: int) -> list[TextBatch]:
        """Held-out rows as the net would meet new texts.

        Words and features that no other row has are unknown in them. They have weights all the
        same, because held-out rows are trained on later.
        """
        among = np.zeros(len(self._words), bool)
        among[held] = True
        encode = restricted(
            self._encoder,
            in_other_rows(self._all.words, np.repeat(among, self._words)),
            in_other_rows(self._all.features, np.repeat(among, self._features)),
        )
        texts = [self._rows.texts[number] for number in held]
        classes = [self._rows.classes[number] for number in held]
        new = Examples(Rows(texts, classes, self._rows.labels, []), self._encoder, encode)
        numbers = range(len(held))
        return [new.batch(numbers[start : start + size]) for start in numbers[::size]]

    def _padded(self, encoded: Encoded) -> Encoded:
        missing = max(self._setting.windows) - len(encoded.words)
        return encoded._replace(words=np.pad(encoded.words, (0, max(missing, 0))))


def in_other_rows(numbers: Ids, held: npt.NDArray[np.bool_]) -> Ids:
    """The numbers that also occur where ``held`` is false; sorted, each once.

    >>> in_other_rows(np.array([5, 2, 5, 3]), np.array([True, False, False, True])).tolist()
    [2, 5]
    """
    counts = np.bincount(numbers)
    counts -= np.bincount(numbers[held], minlength=len(counts))
    return np.flatnonzero(counts)


def restricted(encoder: Encoder, words: Ids, features: Ids) -> Callable[[str], Encoded]:
    """Encodes texts with some words and features alone; their numbers stay the encoder's.

    >>> encoder = Encoder.of(["red fish", "blue fish"], 2, TextSetting())
    >>> red = encoder.encode("red fish")
    >>> restricted(encoder, red.words, red.features)("blue fish").words.tolist().count(UNKNOWN)
    1
    """
    words, features = np.unique(words[words >= FIRST_WORD]), np.unique(features)
    numbers, at = np.concatenate([np.arange(FIRST_WORD), words]), features - 1
    known = Encoder(
        encoder.words[words - FIRST_WORD], encoder.features[at], encoder.idf[at], encoder.setting
    )

    def encode(text: str) -> Encoded:
        found = known.encode(text)
        return Encoded(numbers[found.words], features[found.features - 1], found.values)

    return encode


def random_noise(rng: np.random.Generator) -> Noise:
    """A state for the generator that drops words, features and maps."""
    return rng.integers(1 << 64, size=1, dtype=np.uint64)


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
