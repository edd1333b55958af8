"""The held-out report, against what its definitions give."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from sklearn.metrics import f1_score

from slipstream.service.answers import mean_softmax
from slipstream.service.report import (
    Report,
    calibration_error,
    choose_temperatures,
    measured,
    wilson,
)
from slipstream.service.rows import Rows

RNG = np.random.default_rng(0)


def sample(count: int, scale: float) -> tuple[np.ndarray, list[list[int]]]:
    """Scores whose softmax at this temperature is the truth, and classes drawn from it."""
    scores = RNG.normal(0, 2, (count, 4))
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    held = [[int(RNG.choice(4, p=row))] for row in shares]
    return scores * scale, held


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_temperatures_undo_a_scale(scale: float) -> None:
    scores, held = sample(4_000, scale)
    deep, wide = choose_temperatures(scores, scores, held, (1.0, 1.0))
    shares = mean_softmax(scores, scores, deep, wide)
    right = np.array([row.argmax() == own[0] for row, own in zip(shares, held, strict=True)])
    assert calibration_error(shares.max(1), right) < 0.03
    assert 0.5 * scale < (deep * wide) ** 0.5 < 2 * scale


@pytest.mark.parametrize("count", [9, 50, 500, 2_000])
def test_rows_that_are_all_right_do_not_make_it_certain(count: int) -> None:
    rng = np.random.default_rng(count)
    truth = rng.integers(0, 6, count)
    rows = np.arange(count)
    deep, wide = rng.normal(0, 1, (count, 6)), rng.normal(-1, 0.1, (count, 6))
    deep[rows, truth] += rng.normal(9, 1, count)
    wide[rows, truth] += rng.normal(1.8, 0.2, count)
    chosen = choose_temperatures(deep, wide, [[int(own)] for own in truth], (1.0, 0.25))
    sure = mean_softmax(deep, wide, *chosen).max(1)
    # The prior adds 0.05 of a row's worth, hence not 1 but 0.9 rows are wrong at least.
    assert sure.mean() < 1 - 0.9 / (count + 2)
    assert sure.mean() > 1 - 2 / (count + 2)
    assert min(chosen) > 0.1  # far from the least that is tried


@pytest.mark.parametrize("count", [500, 4_000])
def test_smoothing_hardly_changes_a_calibrated_case(count: int) -> None:
    scores, held = sample(count, 1.0)
    true = [own[0] for own in held]

    def loss(temperature: float) -> float:
        shares = mean_softmax(scores, scores, temperature, temperature)
        return -float(np.log(shares[np.arange(count), true]).mean())

    chosen = choose_temperatures(scores, scores, held, (1.0, 1.0))
    most_likely = min(np.geomspace(0.5, 2, 200), key=loss)
    sure, plain = (
        mean_softmax(scores, scores, *pair).max(1).mean()
        for pair in (chosen, (most_likely, most_likely))
    )
    assert sure == pytest.approx(plain, rel=0.03)


def test_a_whole_report() -> None:
    deep, held = sample(200, 1.0)
    labels = ["a", "b", "c", "d"]
    classes = [[number % 4] for number in range(2_000)]
    report = measured(Rows([], classes, labels, ["beware"]), deep, deep, held, (1.0, 0.25))
    assert (report.rows, report.classes, report.held_out) == (2_000, 4, 200)
    assert report.warnings == ["beware"]
    assert report.baseline == 0.25
    right = sum(count for true, answer, count in report.confusion if true == answer)
    assert report.accuracy == right / 200
    assert report.interval == wilson(right, 200)
    assert sum(count for _, _, count in report.confusion) == 200
    assert sum(found.rows for found in report.per_class) == 200
    answered = [row.answered for row in report.thresholds]
    assert len(answered) == 9
    assert answered == sorted(answered, reverse=True)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_macro_f1_is_that_of_scikit_learn() -> None:
    """Class c is answered, but has no held-out rows; class d has neither."""
    scores = np.eye(4)[[0, 1, 2, 1, 0]] * 9
    held = [[0], [1], [1], [1], [1]]
    rows = Rows([], [[0], [1], [2], [3]] * 5, ["a", "b", "c", "d"], [])
    report = measured(rows, scores, scores, held, (1.0, 1.0))
    true, answers = [own[0] for own in held], scores.argmax(1)
    assert report.macro_f1 == pytest.approx(f1_score(true, answers, average="macro"))


def test_one_of_several_classes_is_right() -> None:
    scores = np.array([[0.0, 3.0]] * 3)
    rows = Rows([], [[0, 1]] * 5, ["a", "b"], [])
    report = measured(rows, scores, scores, [[0, 1], [1], [0]], (1.0, 1.0))
    assert report.accuracy == pytest.approx(2 / 3)
    assert report.confusion == [("b", "b", 2), ("a", "b", 1)]
