"""Rows become batches in native code: as they are, or with dropout; wrong rows are refused."""

from __future__ import annotations

import itertools
import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from slipstream._native import text_batch
from slipstream.apps.service.batches import Examples, Joined
from slipstream.apps.service.features import UNKNOWN, Encoded, Encoder
from slipstream.apps.service.net import TextBatch
from slipstream.apps.service.rows import Rows
from slipstream.apps.service.settings import TextSetting

TEXTS = ["the red fish swims in the sea", "a blue bird", "one", "green bird and red fish"]
CLASSES = [[0], [1, 2], [2], [0, 1, 2]]
SETTING = TextSetting(feature_dropout=0.25, dropout=0.5, rare_words=1.0)
ENCODER = Encoder.of(TEXTS, 3, SETTING)


def examples() -> Examples:
    return Examples(Rows(TEXTS, CLASSES, ["x", "y", "z"], []), ENCODER)


def noise(seed: int = 0) -> np.ndarray:
    return np.array([seed], np.uint64)


@pytest.mark.parametrize("numbers", [[0], [3, 1], [2, 2, 0, 1]])
def test_without_noise_a_batch_has_the_rows_as_they_are(numbers: list[int]) -> None:
    batch = examples().batch(numbers)
    words = np.split(batch.words, batch.word_ends)[:-1]
    features = np.split(batch.features, batch.feature_ends)[:-1]
    values = np.split(batch.values, batch.feature_ends)[:-1]
    for place, number in enumerate(numbers):
        encoded = ENCODER.encode(TEXTS[number])
        length = len(encoded.words)
        assert words[place][:length].tolist() == encoded.words.tolist()
        assert words[place][length:].tolist() == [0] * max(4 - length, 0)  # the widest window
        assert features[place].tolist() == encoded.features.tolist()
        assert values[place].tolist() == encoded.values.tolist()
        targets = np.zeros(3, np.float32)
        targets[CLASSES[number]] = 1 / len(CLASSES[number])
        assert batch.targets[place].tolist() == targets.tolist()
    assert (batch.kept == 1).all()


def test_dropout_keeps_the_mean() -> None:
    rows, state = examples(), noise()
    whole = rows.batch([0, 3])
    features = np.zeros(len(ENCODER.features) + 1)
    kept = np.zeros_like(whole.kept, np.float64)
    draws = 4000
    for _ in range(draws):
        batch = rows.batch([0, 3], state)
        np.add.at(features, batch.features, batch.values / draws)
        kept += batch.kept / draws
        assert set(np.unique(batch.kept)) <= {0.0, 2.0}
        assert len(batch.features) == batch.feature_ends[-1] == len(batch.values)
    expected = np.zeros_like(features)
    np.add.at(expected, whole.features, whole.values)
    np.testing.assert_allclose(features, expected, atol=0.05 * expected.max())
    np.testing.assert_allclose(kept, 1, atol=0.1)


def test_noise_decides_and_advances() -> None:
    rows, state = examples(), noise(7)
    first, second = rows.batch([0, 3], state), rows.batch([0, 3], state)
    again = rows.batch([0, 3], noise(7))
    assert all((one == other).all() for one, other in zip(first, again, strict=True))
    assert (first.kept != second.kept).any()


def test_texts_without_any_word_are_padding() -> None:
    encoder = Encoder.of(["a b"], 2, SETTING)
    rows = Rows(["", ""], [[0], [1]], ["x", "y"], [])
    batch = Examples(rows, encoder).batch([0, 1], noise())
    assert batch.words.tolist() == [0] * 8
    assert len(batch.features) == 0


# ---- what native code refuses

ENCODED = [
    Encoded(np.array([2, 3]), np.array([1]), np.ones(1, np.float32)),
    Encoded(np.array([4]), np.array([2, 3]), np.ones(2, np.float32)),
]
JOINED = Joined.of(ENCODED, [[0], [0, 1]])


def run(**changes: Any) -> int:
    """A batch of both rows; ``changes`` replace arguments."""
    batch = TextBatch(
        np.empty(3, np.int64),
        np.empty(2, np.int64),
        np.empty(3, np.int64),
        np.empty(3, np.float32),
        np.empty(2, np.int64),
        np.empty((2, 2), np.float32),
        np.empty((2, 6), np.float32),
    )
    arguments = {
        "rows": JOINED,
        "numbers": np.array([0, 1]),
        "dropped": np.zeros(5, np.float32),
        "unknown": UNKNOWN,
        "rates": (0.0, 0.0),
        "classes": 2,
        "noise": None,
        "batch": batch,
    }
    return text_batch(**{**arguments, **changes})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a row that is not there": ({"numbers": np.array([0, 2])}, "row 2 is not one of"),
    "a negative row": ({"numbers": np.array([-1, 0])}, "row -1 is not one of"),
    "a word that the table lacks": ({"dropped": np.zeros(4, np.float32)}, "word 4 is not one"),
    "a class that is not there": ({"classes": 1}, "class 1 is not one of"),
    "no class": ({"classes": 0}, "0 or too many classes"),
    "a certain dropout": ({"rates": (1.0, 0.0)}, "not from 0 to less than 1"),
    "a dropout of nan": ({"rates": (0.0, float("nan"))}, "not from 0 to less than 1"),
    "words that end too late": (
        {"rows": JOINED._replace(word_ends=np.array([2, 4]))},
        "row 1 has no range of words",
    ),
    "features that end before they begin": (
        {"rows": JOINED._replace(feature_ends=np.array([3, 1]))},
        "row 1 has no range of features",
    ),
    "classes that begin before the first": (
        {"rows": JOINED._replace(class_ends=np.array([-1, 3]))},
        "row 0 has no range of classes",
    ),
    "too few ends": ({"rows": JOINED._replace(feature_ends=np.array([1]))}, r"rows\[4\] has"),
    "too little noise": ({"noise": np.empty(0, np.uint64)}, r"noise\[0\] has"),
    "parts that are missing": ({"rows": JOINED[:6]}, "there must be 7 parts"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=list(WRONG))
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    assert run() == 3
    with pytest.raises(ValueError, match=message):
        run(**changes)


@pytest.mark.parametrize("part", range(7))
def test_every_part_has_the_right_size(part: int) -> None:
    sizes = [3, 2, 3, 3, 2, 4, 12]
    kinds = [np.int64, np.int64, np.int64, np.float32, np.int64, np.float32, np.float32]
    parts = [np.empty(size, kind) for size, kind in zip(sizes, kinds, strict=True)]
    assert run(batch=parts) == 3
    parts[part] = np.empty(sizes[part] - 1, kinds[part])
    with pytest.raises(ValueError, match=rf"batch\[{part}\] has"):
        run(batch=parts)


# ---- what is written overlaps nothing else

ROWS, BATCH = [f"rows[{part}]" for part in range(7)], [f"batch[{part}]" for part in range(7)]
READ = [*ROWS, "numbers[0]", "dropped[0]"]
OVERLAPS = [
    *itertools.combinations(BATCH, 2),
    *itertools.product(BATCH, READ),
    *(("noise[0]", other) for other in [*READ, *BATCH]),
]


def fresh_arrays() -> dict[str, np.ndarray]:
    """Every array of a batch of both rows, each in memory of its own."""
    sizes = [(3, "i8"), (2, "i8"), (3, "i8"), (3, "f4"), (2, "i8"), (4, "f4"), (12, "f4")]
    return {
        **{name: part.copy() for name, part in zip(ROWS, JOINED, strict=True)},
        **{name: np.empty(*size) for name, size in zip(BATCH, sizes, strict=True)},
        "numbers[0]": np.array([0, 1]),
        "dropped[0]": np.zeros(5, np.float32),
        "noise[0]": noise(),
    }


def run_on(arrays: dict[str, np.ndarray]) -> int:
    return run(
        rows=[arrays[name] for name in ROWS],
        batch=[arrays[name] for name in BATCH],
        numbers=arrays["numbers[0]"],
        dropped=arrays["dropped[0]"],
        noise=arrays["noise[0]"],
    )


def test_arrays_that_do_not_overlap_are_taken() -> None:
    assert run_on(fresh_arrays()) == 3


@pytest.mark.parametrize(("written", "other"), OVERLAPS)
def test_nothing_is_written_over_another_array(written: str, other: str) -> None:
    arrays = fresh_arrays()
    first, second = arrays[written], arrays[other]
    memory = np.zeros(max(first.nbytes, second.nbytes), np.uint8)
    for name, array in ((written, first), (other, second)):
        arrays[name] = memory[: array.nbytes].view(array.dtype)
        arrays[name][:] = array
    with pytest.raises(ValueError, match=f"^{re.escape(f'{written} overlaps {other}')}$"):
        run_on(arrays)


# ---- memory


def test_rows_are_joined_without_a_second_copy() -> None:
    def rows() -> Iterator[Encoded]:
        for _ in range(100):
            many = np.ones(10_000, np.int64)
            yield Encoded(many, many, many.astype(np.float32))

    tracemalloc.start()
    try:
        joined = Joined.of(rows(), [[0]] * 100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    kept = sum(part.nbytes for part in joined)
    assert kept > 100 * 10_000 * 20
    assert peak < 1.2 * kept


def test_held_out_rows_are_restricted_without_a_copy_of_the_others() -> None:
    texts = [" ".join(f"w{(7 * row + word) % 900}" for word in range(100)) for row in range(500)]
    rows = Rows(texts, [[0], [1]] * 250, ["x", "y"], [])
    examples = Examples(rows, Encoder.of(texts, 2, SETTING))
    tracemalloc.start()
    try:
        examples.held_batches([3], 4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.5 * examples._all.features.nbytes
