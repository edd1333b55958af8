"""The one setting that every classifier is trained with.

Users of the service choose nothing: GaDei's Table 3 gives rate, epochs and batch for all.
"""

from __future__ import annotations

import math

import msgspec


class TextSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the net and how it is trained; the model file has a copy.

    >>> TextSetting().windows
    (2, 3, 4)
    """

    text_words: int = 256  # the first of a text
    most_words: int = 100_000  # the most frequent of all
    dimensions: int = 128
    embedding_range: float = 0.25  # of initial values, either side of 0 (Kim, 2014)
    windows: tuple[int, ...] = (2, 3, 4)
    maps: int = 100
    dropout: float = 0.5
    word_dropout: float = 0.1
    characters: tuple[int, int] = (2, 5)  # n-grams within words, shortest and longest
    least_rows: int = 2  # that a character n-gram is in
    feature_scale: float = 2.0
    feature_dropout: float = 0.5
    most_weights: int = 16_000_000  # of the wide part
    rate: float = 0.01
    held_out: float = 0.1
    least_held_from: int = 50  # rows; with fewer, none are held out
    last_epochs: float = 0.1  # the share of epochs that held-out rows take part in
    least_updates: int = 1_000
    deep_temperature: float = 1.0  # without held-out rows
    wide_temperature: float = 0.25


class JobSetting(msgspec.Struct, frozen=True):
    """``job.json``: what the operator may change.

    >>> JobSetting(epochs=20).batch is None
    True
    """

    epochs: int = 200
    batch: int | None = None
    seed: int = 0
    max_model_bytes: int = 256 << 20


def batch_for(rows: int) -> int:
    """Rows a step, by the paper's Table 3.

    >>> [batch_for(rows) for rows in (9_999, 10_000, 100_001)]
    [2, 4, 32]
    """
    if rows < 10_000:
        return 2
    return 4 if rows <= 100_000 else 32


class Schedule(msgspec.Struct, frozen=True):
    """How many updates the two phases take.

    Attributes:
        batch: Rows an update.
        first: Updates without the held-out rows; 0 if none are held out.
        total: Updates in all.
    """

    batch: int
    first: int
    total: int

    @classmethod
    def of(cls, job: JobSetting, setting: TextSetting, trained: int, held: int) -> Schedule:
        """The schedule for so many rows.

        Args:
            job: The operator's choices.
            setting: The one setting.
            trained: Rows of the first phase.
            held: Rows that are held out of it.

        >>> Schedule.of(JobSetting(), TextSetting(), 900, 100)
        Schedule(batch=2, first=81000, total=91000)
        >>> Schedule.of(JobSetting(epochs=1), TextSetting(), 40, 0).total
        1000
        """
        rows = trained + held
        batch = job.batch or batch_for(rows)
        share = setting.last_epochs if held else 1.0
        first = math.ceil(job.epochs * (1 - share) * trained / batch)
        total = first + math.ceil(job.epochs * share * rows / batch)
        if total < setting.least_updates:
            first = first * setting.least_updates // total
            total = setting.least_updates
        return cls(batch, first, total)
