"""The held-out report, against what its definitions give."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from sklearn.metrics import f1_score

from slipstream.apps.service import report as report_module
from slipstream.apps.service.report import (
    Report,
    Training,
    calibration_error,
    choose_temperatures,
    measured,
    unmeasured,
    wilson,
)
from slipstream.apps.service.rows import Rows
from slipstream.apps.service.temperatures import Scores, Shares, Temperatures

RNG = np.random.default_rng(0)
PLAIN, USUAL = Temperatures(1.0, 1.0), Temperatures(1.0, 0.25)
TRAINING = Training(200, 200, measured_epoch=180, best_epoch=176)


def sample(count: int, scale: float) -> tuple[np.ndarray, list[list[int]]]:
    """Scores whose softmax at this temperature is the truth, and classes drawn from it."""
    scores = RNG.normal(0, 2, (count, 4))
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    held = [[int(RNG.choice(4, p=row))] for row in shares]
    return scores * scale, held


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_temperatures_undo_a_scale(scale: float) -> None:
    scores, held = sample(4_000, scale)
    chosen = choose_temperatures(scores, scores, held, PLAIN)
    shares = chosen.answer(scores, scores)
    right = np.array([row.argmax() == own[0] for row, own in zip(shares, held, strict=True)])
    assert calibration_error(shares.max(1), right) < 0.03
    assert 0.5 * scale < (chosen.deep * chosen.wide) ** 0.5 * chosen.mean < 2 * scale


@pytest.mark.parametrize("count", [9, 50, 500, 2_000])
def test_rows_that_are_all_right_do_not_make_it_certain(count: int) -> None:
    rng = np.random.default_rng(count)
    truth = rng.integers(0, 6, count)
    rows = np.arange(count)
    deep, wide = rng.normal(0, 1, (count, 6)), rng.normal(-1, 0.1, (count, 6))
    deep[rows, truth] += rng.normal(9, 1, count)
    wide[rows, truth] += rng.normal(1.8, 0.2, count)
    chosen = choose_temperatures(deep, wide, [[int(own)] for own in truth], USUAL)
    sure = chosen.answer(deep, wide).max(1)
    # The prior, around surer defaults, counts like half a row.
    assert sure.mean() < 1 - 0.75 / (count + 2)
    assert sure.mean() > 1 - 2 / (count + 2)
    # Far from the least that is tried.
    assert min(msgspec.structs.astuple(chosen)) > 0.1


@pytest.mark.parametrize("count", [500, 4_000])
def test_smoothing_hardly_changes_a_calibrated_case(count: int) -> None:
    scores, held = sample(count, 1.0)
    true = [own[0] for own in held]

    def loss(temperature: float) -> float:
        shares = Temperatures(temperature, temperature).answer(scores, scores)
        return -float(np.log(shares[np.arange(count), true]).mean())

    chosen = choose_temperatures(scores, scores, held, PLAIN)
    most_likely = min(np.geomspace(0.5, 2, 200), key=loss)
    sure, plain = (
        temperatures.answer(scores, scores).max(1).mean()
        for temperatures in (chosen, Temperatures(most_likely, most_likely))
    )
    assert sure == pytest.approx(plain, rel=0.03)


def test_a_whole_report() -> None:
    deep, held = sample(200, 1.0)
    labels = ["a", "b", "c", "d"]
    classes = [[number % 4] for number in range(2_000)]
    report = measured(Rows([], classes, labels, ["beware"]), deep, deep, held, USUAL, TRAINING)
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


def test_report_says_which_model_is_measured_and_where_it_stopped() -> None:
    scores, held = sample(60, 1.0)
    rows = Rows([], [[0], [1], [2], [3]] * 5, ["a", "b", "c", "d"], [])
    full = measured(rows, scores, scores, held, PLAIN, TRAINING)
    assert "of the model after epoch 180, on held-out rows" in full.note
    assert "the final model has 200 epochs, and was not measured itself" in full.note
    assert "stopped" not in full.note
    stopped = Training(67, 200, measured_epoch=47, best_epoch=12, stopped_epoch=42)
    early = measured(rows, scores, scores, held, PLAIN, stopped)
    assert "of the model after epoch 47, on held-out rows" in early.note
    assert "before 200 epochs: at epoch 42 held-out accuracy had not improved since epoch 12" in (
        early.note
    )
    assert early.training == stopped
    few = unmeasured(rows, PLAIN, Training(200, 200))
    assert few.note.endswith("The final model has trained for 200 epochs, on all rows.")


def test_macro_f1_is_that_of_scikit_learn() -> None:
    """Class c is answered, but has no held-out rows; class d has neither."""
    scores = np.eye(4)[[0, 1, 2, 1, 0]] * 9
    held = [[0], [1], [1], [1], [1]]
    rows = Rows([], [[0], [1], [2], [3]] * 5, ["a", "b", "c", "d"], [])
    report = measured(rows, scores, scores, held, PLAIN, TRAINING)
    true, answers = [own[0] for own in held], scores.argmax(1)
    assert report.macro_f1 == pytest.approx(f1_score(true, answers, average="macro"))


def test_one_of_several_classes_is_right() -> None:
    scores = np.array([[0.0, 3.0]] * 3)
    rows = Rows([], [[0, 1]] * 5, ["a", "b"], [])
    report = measured(rows, scores, scores, [[0, 1], [1], [0]], PLAIN, TRAINING)
    assert report.accuracy == pytest.approx(2 / 3)
    assert report.confusion == [("b", "b", 2), ("a", "b", 1)]


def test_temperatures_of_many_scores_are_chosen_by_some(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, held = sample(3_000, 1.0)
    every = choose_temperatures(scores, scores, held, PLAIN)
    monkeypatch.setattr(report_module, "MOST_SCORES", scores.size // 3)
    rows: list[int] = []
    answer = Temperatures.answer

    def noted(self: Temperatures, deep: Scores, wide: Scores) -> Shares:
        rows.append(len(deep))
        return answer(self, deep, wide)

    monkeypatch.setattr(Temperatures, "answer", noted)
    some = choose_temperatures(scores, scores, held, PLAIN)
    assert set(rows) == {1_000}
    sure, plain = (temperatures.answer(scores, scores).max(1) for temperatures in (some, every))
    assert sure.mean() == pytest.approx(plain.mean(), rel=0.05)


@pytest.mark.parametrize("known", ["deep", "wide"])
@pytest.mark.parametrize("count", [30, 1_000])
def test_a_part_that_knows_nothing_does_not_lower_the_confidence(known: str, count: int) -> None:
    """As a mean, the answer could not be surer than 0.625."""
    truth = RNG.integers(0, 4, count)
    knows, guesses = 6 * np.eye(4)[truth], RNG.normal(0, 0.1, (count, 4))
    parts = (knows, guesses) if known == "deep" else (guesses, knows)
    chosen = choose_temperatures(*parts, [[int(own)] for own in truth], PLAIN)
    assert chosen.mean < 0.6
    assert chosen.answer(*parts).max(1).mean() > 0.85


def test_a_calibration_error_that_rises_is_explained() -> None:
    scores = np.eye(2)[[0, 1] * 12] * 9
    rows = Rows([], [[0], [1]] * 12, ["a", "b"], [])
    found = measured(rows, scores, scores, [[0], [1]] * 12, USUAL, TRAINING)
    assert found.calibration.ece_after > found.calibration.ece_before
    assert "The calibration error rose" in found.note
    wrong = measured(rows, scores, scores, [[0], [1], [1], [1]] * 6, USUAL, TRAINING)
    assert "rose" not in wrong.note


def test_a_calibration_error_that_rises_with_the_confidence_is_not_called_lowered() -> None:
    rng, truth = np.random.default_rng(22), np.arange(20) % 5
    deep = rng.normal(size=(20, 5)) + 1.5 * np.eye(5)[truth]
    wide = 0.3 * rng.normal(size=(20, 5)) + 0.4 * np.eye(5)[truth]
    held = [[int(own)] for own in truth]
    rows = Rows([], held, list("abcde"), [])
    found = measured(rows, deep, wide, held, USUAL, TRAINING)
    assert found.calibration.ece_after > found.calibration.ece_before + 0.02
    chosen = choose_temperatures(deep, wide, held, USUAL)
    assert chosen.answer(deep, wide).max(1).mean() > USUAL.answer(deep, wide).max(1).mean() + 0.1
    assert "lowered" not in found.note
