"""The held-out report: how good a classifier is on rows that it has not seen, and how sure.

Temperatures are chosen by the likelihood of held-out rows (Guo and others, 2017), one for each part
of the net. A row of several classes counts as right if the answer is one of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.service.answers import mean_softmax, softmax

Floats = npt.NDArray[np.float64]
BINS = 15
Z = 1.959963984540054  # of a 95% interval
LEAST, MOST = 0.02, 20.0  # temperatures
GRID, ZOOMS = 13, 3
NOTE = "Measured on held-out rows before these joined the training data for the last epochs."
NO_HELD_OUT = "There are too few rows to hold some out: nothing was measured."


class ClassReport(msgspec.Struct):
    """One class: how many held-out rows, and how they were answered."""

    name: str
    rows: int
    precision: float
    recall: float
    f1: float


class Threshold(msgspec.Struct):
    """What happens if only answers of at least this confidence are used."""

    confidence: float
    answered: float
    accuracy: float | None


class Calibration(msgspec.Struct):
    """Temperatures, and the expected calibration error of 15 bins."""

    deep_temperature: float
    wide_temperature: float
    ece_before: float | None = None
    ece_after: float | None = None


class Report(msgspec.Struct):
    """``report.json``.

    Attributes:
        rows: All rows.
        classes: How many classes.
        held_out: Rows that it was measured on.
        accuracy: Of them, the share with a right answer; null if none were held out.
        interval: Its 95% interval (Wilson).
        macro_f1: The mean of the classes' F1, of classes with held-out rows.
        baseline: The share of the most frequent class.
        confusion: Triples: true class, answer, how many; the most frequent first.
    """

    rows: int
    classes: int
    held_out: int
    calibration: Calibration
    warnings: list[str]
    note: str
    baseline: float
    accuracy: float | None = None
    interval: tuple[float, float] | None = None
    macro_f1: float | None = None
    per_class: list[ClassReport] = []
    confusion: list[tuple[str, str, int]] = []
    thresholds: list[Threshold] = []


class Facts(msgspec.Struct, frozen=True):
    """What is known of the training data."""

    labels: list[str]
    classes: list[list[int]]
    warnings: list[str]

    @property
    def baseline(self) -> float:
        """The share of rows that the most frequent class is right for."""
        counts = Counter(number for own in self.classes for number in own)
        return max(counts.values()) / len(self.classes)


def unmeasured(facts: Facts, temperatures: tuple[float, float]) -> Report:
    """The report where no rows were held out.

    >>> unmeasured(Facts(["a", "b"], [[0], [1], [0]], []), (1.0, 0.25)).accuracy is None
    True
    """
    return Report(
        rows=len(facts.classes),
        classes=len(facts.labels),
        held_out=0,
        calibration=Calibration(*temperatures),
        warnings=facts.warnings,
        note=NO_HELD_OUT,
        baseline=facts.baseline,
    )


def measured(
    facts: Facts,
    deep: npt.NDArray[np.floating],
    wide: npt.NDArray[np.floating],
    held: Sequence[list[int]],
    defaults: tuple[float, float],
) -> Report:
    """The report on held-out rows.

    Args:
        facts: The training data.
        deep: Scores of the deep part, a held-out row each.
        wide: Scores of the wide part.
        held: The classes of each held-out row.
        defaults: Temperatures before they were chosen.

    Returns:
        The report, with the chosen temperatures.

    >>> scores = np.array([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    >>> facts = Facts(["a", "b"], [[0], [1]] * 5, [])
    >>> measured(facts, scores, scores, [[0], [1], [1]], (1.0, 1.0)).confusion
    [('a', 'a', 1), ('b', 'a', 1), ('b', 'b', 1)]
    """
    temperatures = choose_temperatures(deep, wide, held)
    before, after = (mean_softmax(deep, wide, *pair) for pair in (defaults, temperatures))
    answers = after.argmax(1)
    right = right_answers(answers, held)
    per_class, confusion = by_class(facts.labels, answers, held)
    return Report(
        rows=len(facts.classes),
        classes=len(facts.labels),
        held_out=len(held),
        calibration=Calibration(
            *temperatures,
            calibration_error(before.max(1), right_answers(before.argmax(1), held)),
            calibration_error(after.max(1), right),
        ),
        warnings=facts.warnings,
        note=NOTE,
        baseline=facts.baseline,
        accuracy=float(right.mean()),
        interval=wilson(int(right.sum()), len(held)),
        macro_f1=float(np.mean([found.f1 for found in per_class if found.rows])),
        per_class=per_class,
        confusion=confusion,
        thresholds=[threshold(tenth / 10, after.max(1), right) for tenth in range(1, 10)],
    )


def right_answers(
    answers: npt.NDArray[np.int64], held: Sequence[list[int]]
) -> npt.NDArray[np.bool_]:
    """Whether each answer is one of its row's classes.

    >>> right_answers(np.array([0, 1]), [[0, 1], [0]]).tolist()
    [True, False]
    """
    return np.array([answer in own for answer, own in zip(answers.tolist(), held, strict=True)])


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share.

    >>> [round(end, 3) for end in wilson(90, 100)]
    [0.826, 0.945]
    """
    share, square = right / count, Z * Z / count
    middle = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / count / 4)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def calibration_error(confidence: Floats, right: npt.NDArray[np.bool_]) -> float:
    """The expected calibration error: |accuracy - confidence|, by bins of confidence.

    >>> calibration_error(np.array([0.8, 0.8]), np.array([True, False]))
    0.30000000000000004
    """
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, confidence - right, minlength=BINS)
    return float(np.abs(gaps).sum() / len(right))


def threshold(confidence: float, sure: Floats, right: npt.NDArray[np.bool_]) -> Threshold:
    """What remains if less sure answers are dropped.

    >>> threshold(0.5, np.array([0.4, 0.6]), np.array([False, True]))
    Threshold(confidence=0.5, answered=0.5, accuracy=1.0)
    """
    kept = sure >= confidence
    accuracy = float(right[kept].mean()) if kept.any() else None
    return Threshold(confidence, float(kept.mean()), accuracy)


def by_class(
    labels: list[str], answers: npt.NDArray[np.int64], held: Sequence[list[int]]
) -> tuple[list[ClassReport], list[tuple[str, str, int]]]:
    """Precision, recall and F1 of each class, and the confusion as triples.

    >>> by_class(["a", "b"], np.array([0, 0]), [[0], [1]])[0][0].precision
    0.5
    """
    pairs = [
        (answer if answer in own else own[0], answer)
        for answer, own in zip(answers.tolist(), held, strict=True)
    ]
    confusion = Counter(pairs)
    true, given = Counter(true for true, _ in pairs), Counter(answer for _, answer in pairs)
    classes = []
    for number, label in enumerate(labels):
        right = confusion[number, number]
        precision = right / given[number] if given[number] else 0.0
        recall = right / true[number] if true[number] else 0.0
        f1 = 2 * right / (true[number] + given[number]) if true[number] + given[number] else 0.0
        classes.append(ClassReport(label, true[number], precision, recall, f1))
    triples = [(labels[a], labels[b], count) for (a, b), count in confusion.items() if count]
    return classes, sorted(triples, key=lambda triple: (-triple[2], triple[0], triple[1]))


# ---- temperatures


def choose_temperatures(
    deep: npt.NDArray[np.floating],
    wide: npt.NDArray[np.floating],
    held: Sequence[list[int]],
) -> tuple[float, float]:
    """The temperatures under which held-out rows are most likely: a grid that zooms in.

    >>> sure = np.array([[9.0, 0.0], [9.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    >>> hot, _ = choose_temperatures(sure, sure, [[0], [0], [1], [1]])
    >>> hot > 3  # one of four was wrong: far too sure
    True
    """
    log_least, log_most = math.log(LEAST), math.log(MOST)
    of_deep, of_wide = (_likelihood(scores, held) for scores in (deep, wide))
    best = (0.0, 0.0)
    reach = (log_most - log_least) / 2
    centres = [(log_least + log_most) / 2] * 2
    for _ in range(ZOOMS):
        grids = [
            np.clip(np.linspace(centre - reach, centre + reach, GRID), log_least, log_most)
            for centre in centres
        ]
        rows = [np.stack([of_deep(t) for t in grids[0]]), np.stack([of_wide(t) for t in grids[1]])]
        mixed = (rows[0][:, None, :] + rows[1][None, :, :]) / 2
        loss = -np.log(np.maximum(mixed, 1e-12)).mean(2)
        i, j = np.unravel_index(int(loss.argmin()), loss.shape)
        best = (float(grids[0][i]), float(grids[1][j]))
        centres, reach = list(best), reach / (GRID - 1) * 2
    return math.exp(best[0]), math.exp(best[1])


def _likelihood(
    scores: npt.NDArray[np.floating], held: Sequence[list[int]]
) -> Callable[[float], Floats]:
    """The probability of each row's classes, by the temperature's logarithm."""

    def of(log_temperature: float) -> Floats:
        shares = softmax(scores / math.exp(log_temperature))
        return np.array([row[own].sum() for row, own in zip(shares, held, strict=True)])

    return of
