"""Words and features of texts, against plain definitions of them."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.apps.service.batches import Examples, hold_out
from slipstream.apps.service.features import (
    FIRST_WORD,
    UNKNOWN,
    Encoder,
    hash_characters,
    hash_terms,
    hash_words,
)
from slipstream.apps.service.rows import Rows
from slipstream.apps.service.settings import TextSetting
from slipstream.apps.service.words import words_of

WORDS = st.lists(st.text("abéß東😀", min_size=1, max_size=6), max_size=8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't panic!", ["don't", "panic", "!"]),
        ("Don\u2019t", ["don't"]),
        ("\uff26\uff35ll \ufb01ne", ["full", "fine"]),
        ("東京タワーに3回", [*"東京タワーに", "3", "回"]),
        ("안녕 세상", ["안녕", "세상"]),
        ("مرحبا، عالم", ["مرحبا", "،", "عالم"]),
        ("a\u0301b", ["áb"]),
        (r"my\npass\tword", ["my", "pass", "word"]),  # written escapes, as in training data
        ("my\x01word", ["my", "word"]),
        ("", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert words_of(text, 256) == words


def test_only_the_first_words_count() -> None:
    assert words_of("a b c d", 2) == ["a", "b"]


@given(WORDS)
def test_equal_words_and_only_these_have_equal_hashes(words: list[str]) -> None:
    hashes = hash_words(words).tolist()
    assert len(set(hashes)) == len(set(words))
    assert dict(zip(words, hashes, strict=True)) == {
        word: int(hash_words([word])[0]) for word in words
    }
    apart = [(first, None, second) for first, second in zip(words, words[2:], strict=False)]
    terms = [*((word,) for word in words), *pairwise(words), *apart]
    assert len(set(hash_terms(words).tolist())) == len(set(terms))


@given(WORDS)
def test_character_n_grams_stay_within_words(words: list[str]) -> None:
    grams = Counter(
        f" {word} "[start : start + n]
        for word in words
        for n in range(2, 6)
        for start in range(len(word) + 3 - n)
    )
    found = Counter(hash_characters(words, 2, 5).tolist())
    assert sorted(found.values()) == sorted(grams.values())


def test_values_are_tf_idf() -> None:
    texts = ["to be or not to be", "to do", "be"]
    setting = TextSetting(characters=(5, 5))
    encoder = Encoder.of(texts, 2, setting)
    encoded = encoder.encode(texts[0])
    idf = {
        term: 1 + math.log(4 / (1 + rows))
        for term, rows in {"to": 2, "be": 2, "or": 1, "not": 1, "to be": 1, "be or": 1}.items()
    }
    once = ["or not", "not to", "to * or", "be * not", "or * to", "not * be"]
    idf |= dict.fromkeys(once, idf["or"])
    raw = {t: (1 + math.log(2 if t in ("to", "be", "to be") else 1)) * v for t, v in idf.items()}
    norm = math.sqrt(sum(value**2 for value in raw.values()))
    expected = sorted(2 * value / norm for value in raw.values())
    np.testing.assert_allclose(sorted(encoded.values), expected, rtol=1e-6)


def test_rare_features_go_first_and_numbers_fit() -> None:
    texts = [f"common word{number}" for number in range(50)]
    setting = TextSetting(most_weights=40, most_words=10)
    encoder = Encoder.of(texts, 4, setting)
    assert len(encoder.features) == 9  # and padding: ten rows of four
    assert len(encoder.words) == 10
    encoded = encoder.encode("common nonsense")
    assert (encoded.words == UNKNOWN).tolist() == [False, True]
    assert encoded.words.max() < len(encoder.words) + FIRST_WORD
    assert 0 < encoded.features.min() <= encoded.features.max() <= len(encoder.features)


def test_words_are_kept_before_what_many_rows_share() -> None:
    """Else a set of many classes would lose just the words that name a class."""
    names = [f"name{number}z" for number in range(1000)]
    texts = [f"please tell me all about {name}" for name in names]
    encoder = Encoder.of(texts, len(names), TextSetting(most_weights=1500 * len(names)))
    assert len(encoder.features) == 1499
    assert np.isin(hash_words([*names, "please", "about"]), encoder.features).all()
    assert np.isin(hash_terms(["tell", "me"]), encoder.features).all()  # the rest: the most common


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True), max_size=150))
def test_no_class_loses_its_last_row(classes: list[list[int]]) -> None:
    held = hold_out(classes, TextSetting(), 0)
    left = [own for number, own in enumerate(classes) if number not in set(held)]
    assert {c for own in left for c in own} == {c for own in classes for c in own}
    assert held == hold_out(classes, TextSetting(), 0)
    assert len(held) <= len(classes) * 0.1 + 1
    assert not held or len(classes) >= 50


def test_a_class_gives_a_tenth_of_its_rows_at_most() -> None:
    """What classes of one row cannot give is not asked of the next."""
    classes = [[own] for own in range(900)] + [[900]] * 100 + [[901]] * 50
    held = Counter(classes[number][0] for number in hold_out(classes, TextSetting(), 0))
    assert set(held) == {900, 901}
    assert held[900] <= 11
    assert held[901] <= 6


def test_rows_that_cannot_be_held_out_are_passed_over() -> None:
    """Each third row has a class that no other row has."""
    classes = [[0, 2 + row] if row % 3 == 0 else [row % 2] for row in range(900)]
    held = hold_out(classes, TextSetting(), 0)
    assert len(held) >= 88
    assert all(len(classes[number]) == 1 for number in held)


def test_held_out_rows_are_encoded_as_new_texts() -> None:
    texts = ["red fish swims", "blue fish swims", "green bird sings", "a red bird"]
    rows = Rows(texts, [[0], [0], [1], [1]], ["x", "y"], [])
    examples = Examples(rows, Encoder.of(texts, 2, TextSetting()))
    [held] = examples.held_batches([1, 2], 4)
    seen = examples.batch([0, 3])
    assert (held.words == UNKNOWN).tolist()[:3] == [True, False, False]  # blue
    assert held.words[1] == seen.words[1]  # fish: its number is still the net's
    assert set(held.features) <= set(seen.features)
    for values in np.split(held.values, held.feature_ends[:-1]):
        groups = np.square(values).sum()  # each of two groups has the norm feature_scale
        assert groups == pytest.approx(2 * TextSetting().feature_scale ** 2, rel=1e-5)


def test_rare_words_become_unknown_by_their_count() -> None:
    texts = ["often often often rare", "often word word", "a"]
    rows = Rows(texts, [[0], [1], [0]], ["x", "y"], [])
    encoder = Encoder.of(texts, 2, TextSetting(rare_words=1.0))
    examples = Examples(rows, encoder)
    noise = np.zeros(1, np.uint64)
    drawn = [examples.batch([0, 1, 2], noise).words for _ in range(2000)]
    unknown = np.mean([words == UNKNOWN for words in drawn], axis=0)
    seen = [4, 4, 4, 1, 4, 2, 2, 0, 1, 0, 0, 0]  # 0: padding up to the widest window
    expected = [1 / (1 + count) if count else 0.0 for count in seen]
    np.testing.assert_allclose(unknown, expected, atol=0.05)
    assert (examples.batch([0, 1, 2]).words != UNKNOWN).all()  # nothing is dropped when answering


def test_features_are_of_more_words_than_the_deep_part_has() -> None:
    """A text of 1,024 Han characters is 1,024 words."""
    setting = TextSetting()
    lead = "\u6c34" * (setting.text_words + 10)
    texts = [f"{lead}\u706b\u5c71", f"{lead}\u91d1\u6728"]
    encoder = Encoder.of(texts, 2, setting)
    first, second = (encoder.encode(text) for text in texts)
    assert len(first.words) == len(second.words) == setting.text_words
    assert set(first.features) != set(second.features)
