"""Sentences as rows of word numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.apps.bench.data.examples import Split, TensorExamples, split_off
from slipstream.apps.bench.data.labelled_text import LabelledText, Sentence, check_enough

PADDING, UNKNOWN = 0, 1
# Every row is as long as the longest sentence, up to this limit; longer sentences are cut. The
# widest window of a convolution has to fit into the shortest row.
MOST_WORDS, FEWEST_WORDS = 64, 8
TEST_SHARE = 0.1
_WORD = re.compile(r"\w+(?:'\w+)?|[^\w\s]")


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words by frequency; 0 is padding and 1 is any other word."""

    numbers: dict[str, int]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Vocabulary:
        counts = Counter(word for text in texts for word in words(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls({word: number for number, word in enumerate(ranked, start=UNKNOWN + 1)})

    def __len__(self) -> int:
        return len(self.numbers) + 2

    def encode(self, texts: Sequence[str], length: int) -> Tensor:
        rows = torch.full((len(texts), length), PADDING)
        for row, text in zip(rows, texts, strict=True):
            numbers = [self.numbers.get(word, UNKNOWN) for word in words(text)[:length]]
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.long)
        return rows


@dataclass(frozen=True, slots=True)
class TextSplit:
    """Encoded sentences, and the number of words of the embedding."""

    split: Split[TensorExamples]
    words: int


def encode_text(text: LabelledText, *, seed: int = 0) -> TextSplit:
    """Number words and labels by the training part; split off a tenth if no test is given."""
    check_enough(text)
    train, test = text.train, text.test
    if not test:
        train_rows, test_rows = split_off(len(train), TEST_SHARE, seed)
        train, test = (tuple(train[i] for i in part.tolist()) for part in (train_rows, test_rows))
    labels = {label: i for i, label in enumerate(sorted({label for _, label in text.train}))}
    # A label that does not occur in training cannot be learnt; it is removed from the test.
    test = tuple(sentence for sentence in test if sentence[1] in labels)
    vocabulary = Vocabulary.of(sentence for sentence, _ in train)
    longest = max(len(words(sentence)) for sentence, _ in train)
    length = min(MOST_WORDS, max(FEWEST_WORDS, longest))

    def examples(sentences: Sequence[Sentence]) -> TensorExamples:
        rows = vocabulary.encode([sentence for sentence, _ in sentences], length)
        return TensorExamples(rows, torch.tensor([labels[label] for _, label in sentences]))

    split = Split(examples(train), examples(test), len(labels), text.origin)
    return TextSplit(split, len(vocabulary))
