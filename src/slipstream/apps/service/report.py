"""The held-out report: how good a classifier is on rows that it has not seen, and how sure.

Temperatures are chosen by the likelihood of held-out rows (Guo and others, 2017): one for each part
of the net, one for their mean. Where all n rows are right, certainty is the most likely, but n rows
do not show it. So each counts as (n+1)/(n+2) right and 1/(n+2) wrong, as Platt (1999) has it: p is
the probability of a row's classes, and the loss is

    -(n+1)/(n+2) · ln p - 1/(n+2) · ln(1 - p)

Few rows are answered as well by one sure and one doubtful part as by two sensible ones. A weak
prior on ln T, around the defaults, prefers the latter. Its weight was chosen by test rows of 25
models, of 60 to 15,000 rows of TREC, MR and clinc150 (20 to 200 epochs), as was T_m:

    weight, in rows       accuracy    calibration error    without T_m
    0.05                  0.679       0.099                0.678, 0.102
    0.5                   0.680       0.084                0.681, 0.100
    1                     0.681       0.084                0.682, 0.102

A row of several classes counts as right if the answer is one of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple, replace

from slipstream.apps.service.rows import Rows
from slipstream.apps.service.temperatures import Scores, Shares, Temperatures

BINS = 15
Z = 1.959963984540054  # of a 95% interval
LEAST, MOST = 0.02, 20.0  # temperatures
MOST_SCORES = 1_000_000  # that temperatures are chosen by; of more, every second row, or third
PRIOR = 0.5  # the weight of the distance from the defaults, in rows
STEP = 1.5  # of logarithms, where the search begins
NOT_SHOWN = (
    " The calibration error rose: the confidence was lowered, since so few rows do not show that "
    "the classifier may be so sure."
)
NO_HELD_OUT = "There are too few rows to hold some out: nothing was measured."

Right = npt.NDArray[np.bool_]


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
    mean_temperature: float = 1.0
    ece_before: float | None = None
    ece_after: float | None = None


class Training(msgspec.Struct, frozen=True):
    """Which model was measured, and when the training ended, in passes over the data.

    Attributes:
        epochs: The passes that the final model has made.
        most_epochs: The passes that it makes if it does not stop early.
        measured_epoch: The epoch of the model that was measured.
        best_epoch: The first epoch of the best held-out accuracy on the way.
        stopped_epoch: The epoch from which the rate fell to 0 early; null if it did not.
    """

    epochs: int
    most_epochs: int
    measured_epoch: int | None = None
    best_epoch: int | None = None
    stopped_epoch: int | None = None

    @property
    def sentences(self) -> str:
        """What a reader of the report has to know of it."""
        found = f"The final model has trained for {self.epochs} epochs, on all rows."
        if self.measured_epoch is not None:
            found = (
                f"Every figure is of the model after epoch {self.measured_epoch}, on held-out rows "
                "that it had not seen. These then joined the training data for the final pass: the "
                f"final model has {self.epochs} epochs, and was not measured itself."
            )
        if self.stopped_epoch is not None:
            found += (
                f" The training stopped before {self.most_epochs} epochs: at epoch "
                f"{self.stopped_epoch} held-out accuracy had not improved since epoch "
                f"{self.best_epoch}."
            )
        return found


class Report(msgspec.Struct):
    """``report.json``; what is null was not measured, because no rows were held out."""

    rows: int
    classes: int
    held_out: int  # rows that it was measured on
    calibration: Calibration
    warnings: list[str]
    note: str
    baseline: float  # the share of rows that the most frequent class is right for
    accuracy: float | None = None
    interval: tuple[float, float] | None = None  # of accuracy, 95% (Wilson)
    cut: int = 0  # texts that were too long, and were cut
    macro_f1: float | None = None  # the mean over classes of held-out rows or answers
    per_class: list[ClassReport] = []
    confusion: list[tuple[str, str, int]] = []  # true class, answer, how many
    thresholds: list[Threshold] = []
    training: Training | None = None  # null in reports of earlier versions


def unmeasured(rows: Rows, temperatures: Temperatures, training: Training) -> Report:
    """The report where no rows were held out."""
    counts = Counter(number for own in rows.classes for number in own)
    return Report(
        rows=len(rows.classes),
        classes=len(rows.labels),
        held_out=0,
        calibration=Calibration(*astuple(temperatures)),
        warnings=rows.warnings,
        note=f"{NO_HELD_OUT} {training.sentences}",
        training=training,
        baseline=max(counts.values()) / len(rows.classes),
        cut=rows.cut,
    )


def measured(
    rows: Rows,
    deep: Scores,
    wide: Scores,
    held: Sequence[list[int]],
    defaults: Temperatures,
    training: Training,
) -> Report:
    """The report on held-out rows, and the temperatures that they choose instead of ``defaults``.

    ``deep`` and ``wide`` have the scores of each held-out row, ``held`` has its classes.

    >>> scores = np.array([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    >>> rows = Rows([], [[0], [1]] * 5, ["a", "b"], [])
    >>> temperatures, training = Temperatures(1.0, 1.0), Training(200, 200, measured_epoch=180)
    >>> measured(rows, scores, scores, [[0], [1], [1]], temperatures, training).confusion
    [('a', 'a', 1), ('b', 'a', 1), ('b', 'b', 1)]
    """
    chosen = choose_temperatures(deep, wide, held, defaults)
    before, after = (temperatures.answer(deep, wide) for temperatures in (defaults, chosen))
    right, sure, first_sure = right_answers(after, held), after.max(1), before.max(1)
    errors = (
        calibration_error(first_sure, right_answers(before, held)),
        calibration_error(sure, right),
    )
    # It also rises where confidence does: temperatures are chosen by the likelihood, not by it.
    lowered = errors[1] > errors[0] and sure.mean() < first_sure.mean()
    per_class, confusion = by_class(rows.labels, after, held)
    seen = {name for true, answer, _ in confusion for name in (true, answer)}
    unscored = unmeasured(rows, chosen, training)
    return replace(
        unscored,
        held_out=len(held),
        calibration=replace(unscored.calibration, ece_before=errors[0], ece_after=errors[1]),
        note=training.sentences + (NOT_SHOWN if lowered else ""),
        accuracy=float(right.mean()),
        interval=wilson(int(right.sum()), len(held)),
        macro_f1=float(np.mean([found.f1 for found in per_class if found.name in seen])),
        per_class=per_class,
        confusion=confusion,
        thresholds=[threshold(tenth / 10, sure, right) for tenth in range(1, 10)],
    )


def right_answers(shares: Shares, held: Sequence[list[int]]) -> Right:
    """Whether the most likely class is one of the row's, for each row."""
    return np.array([row.argmax() in own for row, own in zip(shares, held, strict=True)])


def threshold(least: float, sure: Shares, right: Right) -> Threshold:
    """How many answers have at least this confidence, and how many of them are right."""
    used = right[sure >= least]
    return Threshold(least, len(used) / len(right), float(used.mean()) if len(used) else None)


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share.

    >>> [round(end, 3) for end in wilson(90, 100)]
    [0.826, 0.945]
    """
    share, square = right / count, Z * Z / count
    middle = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / count / 4)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def calibration_error(sure: Shares, right: Right) -> float:
    """The expected calibration error: |accuracy - confidence|, by bins of confidence.

    >>> calibration_error(np.array([0.8, 0.8]), np.array([True, False]))
    0.30000000000000004
    """
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(bins, sure - right)).sum() / len(right))


def by_class(
    labels: list[str], shares: Shares, held: Sequence[list[int]]
) -> tuple[list[ClassReport], list[tuple[str, str, int]]]:
    """Precision, recall and F1 of each class, and the confusion as triples."""
    answers = shares.argmax(1).tolist()
    true = [a if a in own else own[0] for a, own in zip(answers, held, strict=True)]
    confusion = Counter(zip(true, answers, strict=True))
    rows, given = Counter(true), Counter(answers)
    classes = []
    for number, label in enumerate(labels):
        right = confusion[number, number]
        precision, recall = right / max(given[number], 1), right / max(rows[number], 1)
        f1 = 2 * right / max(rows[number] + given[number], 1)
        classes.append(ClassReport(label, rows[number], precision, recall, f1))
    triples = [(labels[a], labels[b], count) for (a, b), count in confusion.items() if count]
    return classes, sorted(triples, key=lambda triple: (-triple[2], triple[0], triple[1]))


def choose_temperatures(
    deep: Scores, wide: Scores, held: Sequence[list[int]], defaults: Temperatures
) -> Temperatures:
    """The temperatures that fit held-out rows best.

    >>> sure = np.array([[9.0, 0.0], [9.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    >>> found = choose_temperatures(sure, sure, [[0], [0], [1], [1]], Temperatures(1.0, 1.0))
    >>> bool(found.answer(sure, sure).max() < 0.9)  # one of four was wrong: not so sure
    True
    """
    # Only a training job needs it; the API process, which describes reports, stays small.
    from scipy.optimize import minimize

    some = slice(None, None, math.ceil(deep.size / MOST_SCORES))
    deep, wide, held = deep[some], wide[some], held[some]
    truth = np.zeros(deep.shape)
    for row, own in zip(truth, held, strict=True):
        row[own] = 1
    target, prior = (len(held) + 1) / (len(held) + 2), np.log(astuple(defaults))

    def loss(logarithms: Shares) -> float:
        right = (Temperatures(*np.exp(logarithms)).answer(deep, wide) * truth).sum(1)
        right = np.clip(right, 1e-12, 1 - 1e-12)
        fit = (target * np.log(right) + (1 - target) * np.log1p(-right)).mean()
        return float(PRIOR / len(held) * np.square(logarithms - prior).sum() - fit)

    found = minimize(
        loss,
        prior,
        method="Nelder-Mead",
        bounds=[(math.log(LEAST), math.log(MOST))] * len(prior),
        options={"initial_simplex": prior + STEP * np.eye(len(prior) + 1, len(prior), -1)},
    )
    return Temperatures(*np.exp(found.x).tolist())
