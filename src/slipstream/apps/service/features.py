"""What a text is to the net: numbers of its words, and tf-idf of words, pairs and characters.

A word, a pair of words and a character n-gram are 64-bit hashes. A model keeps them sorted, 8 bytes
each, and finds them by bisection: no text of a user is in a model, and loading one builds no
dictionary. n features share a hash with probability n²/2⁶⁵: at 10⁶ features, 3·10⁻⁸.

    value(f) = s · (1 + ln count) · idf(f) / norm of its group,  idf(f) = 1 + ln((1 + N)/(1 + N_f))

The groups are words with pairs, and characters. N rows, N_f of them with f.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.apps.service.settings import TextSetting
from slipstream.apps.service.words import words_of

Hashes = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]

UNKNOWN = 1  # a word's number; 0 is padding
FIRST_WORD = 2
BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, of the polynomial
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # splitmix64's: over all bits, 1 to 1
COUNTED = 1024  # rows of hashes that are in memory before they are counted


class Encoded(NamedTuple):
    """A text as the net takes it.

    Attributes:
        words: Numbers of its words.
        features: Numbers of its known features, from 1.
        values: Their tf-idf.
    """

    words: Ids
    features: Ids
    values: Values

    @property
    def known(self) -> bool:
        """Whether any word or feature of it was in the training data."""
        return bool(len(self.features)) or bool((self.words >= FIRST_WORD).any())


class Encoder(NamedTuple):
    """Makes numbers of texts.

    Attributes:
        words: Sorted hashes of known words; the i-th has the number i + FIRST_WORD.
        features: Sorted hashes of known features; the i-th has the number i + 1.
        idf: The weight of each feature.
        setting: What else decides.

    >>> encoder = Encoder.of(["red fish", "blue fish"], 2, TextSetting())
    >>> encoder.encode("red bird").words.tolist().count(UNKNOWN)
    1
    """

    words: Hashes
    features: Hashes
    idf: Values
    setting: TextSetting

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        classes: int,
        setting: TextSetting,
        watch: Callable[[list[list[str]]], Iterable[list[str]]] = iter,
    ) -> Encoder:
        """Learn words and features from texts; each feature has a weight for each class.

        ``watch`` goes through the texts' words while most of the work is done.
        """
        split = [words_of(text, setting.feature_words) for text in texts]
        words, counts = _count(hash_words(own[: setting.text_words]) for own in split)
        kept = _first(np.lexsort((words, -counts)), words, setting.most_words)
        terms, term_rows = _count(np.unique(hash_terms(own)) for own in split)
        grams, gram_rows = _count(
            np.unique(hash_characters(own, *setting.characters)) for own in watch(split)
        )
        often = gram_rows >= setting.least_rows
        features = np.concatenate([terms, grams[often]])
        rows = np.concatenate([term_rows, gram_rows[often]])
        # Words first: with thousands of classes not all features fit, and those that many rows
        # share tell classes apart least.
        every, _ = _count(map(hash_words, split))
        order = np.lexsort((features, -rows, ~np.isin(features, every)))
        chosen = _first(order, features, setting.most_weights // classes - 1)
        idf = 1 + np.log((1 + len(texts)) / (1 + rows[chosen]))
        return cls(words[kept], features[chosen], idf.astype(np.float32), setting)

    def encode(self, text: str) -> Encoded:
        """The numbers of one text."""
        words = words_of(text, self.setting.feature_words)
        at, known = _find(self.words, hash_words(words[: self.setting.text_words]))
        terms, term_values = self._weigh(hash_terms(words))
        grams, gram_values = self._weigh(hash_characters(words, *self.setting.characters))
        return Encoded(
            np.where(known, at + FIRST_WORD, UNKNOWN),
            np.concatenate([terms, grams]),
            np.concatenate([term_values, gram_values]),
        )

    def _weigh(self, hashes: Hashes) -> tuple[Ids, Values]:
        """Numbers and tf-idf of the known features of one group."""
        own, counts = np.unique(hashes, return_counts=True)
        at, known = _find(self.features, own)
        values = (1 + np.log(counts[known])) * self.idf[at[known]]
        norm = np.linalg.norm(values) or 1.0
        return at[known] + 1, (values * (self.setting.feature_scale / norm)).astype(np.float32)


def _find(table: Hashes, hashes: Hashes) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Where each hash is in a sorted table, and whether it is there."""
    at = np.searchsorted(table, hashes)
    known = at < len(table)
    known[known] = table[at[known]] == hashes[known]
    return at, known


# ---- hashes


def hash_words(words: Sequence[str]) -> Hashes:
    """A hash of each word: a polynomial of its code points, then mixed."""
    if not words:
        return np.zeros(0, np.uint64)
    points = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), np.uint32)
    lengths = np.array([len(word) for word in words])
    starts = np.cumsum(lengths) - lengths
    powers = np.cumprod(np.full(lengths.max(), BASE))
    terms = points * powers[np.arange(len(points)) - np.repeat(starts, lengths)]
    mixed: Hashes = np.add.reduceat(terms, starts) + lengths.astype(np.uint64)
    for shift, factor in MIX:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def hash_terms(words: Sequence[str]) -> Hashes:
    """Hashes of words, of pairs of words that follow each other, and of pairs with one between.

    >>> len(hash_terms(["a", "b", "c"]))  # "a" "b" "c" "a b" "b c" "a * c"
    6
    """
    pairs = [f"{first} {second}" for first, second in pairwise(words)]
    apart = [f"{first} * {second}" for first, second in zip(words, words[2:], strict=False)]
    return hash_words([*words, *pairs, *apart])


def hash_characters(words: Sequence[str], shortest: int, longest: int) -> Hashes:
    """Hashes of character n-grams of words; a space stands before and after each word.

    >>> len(hash_characters(["cat"], 2, 3))  # " c" "ca" "at" "t " " ca" "cat" "at "
    7
    """
    # The NUL tells a group of letters from a word of the same letters.
    return hash_words(
        [
            f"\0{f' {word} '[start : start + n]}"
            for word in words
            for n in range(shortest, longest + 1)
            for start in range(len(word) + 3 - n)
        ]
    )


# ---- counting


def _count(rows: Iterator[Hashes]) -> tuple[Hashes, Ids]:
    """Distinct hashes, sorted, and how often each comes."""
    parts = [
        np.unique(np.concatenate(some), return_counts=True)
        for some in iter(lambda: list(islice(rows, COUNTED)), [])
    ]
    hashes, counts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    distinct, place = np.unique(hashes, return_inverse=True)
    return distinct, np.bincount(place, counts, len(distinct)).astype(np.int64)


def _first(order: Ids, hashes: Hashes, most: int) -> Ids:
    """The first places of an order, sorted by their hashes."""
    places = order[: max(most, 0)]
    return places[np.argsort(hashes[places])]
