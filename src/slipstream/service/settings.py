"""The one setting that every classifier is trained with.

Users of the service choose nothing: GaDei's Table 3 gives rate, epochs and batch for all.

By held-out rows of TREC (6 and 50 classes) and MR, one split each, a rate that falls beats a
constant one of the same mean by 0.7 to 2.2 points in the deep part. In the wide part alone
(one split, one seed), feature dropout 0.3 is better than 0.5 on held-out rows of TREC fine (0.818
to 0.806) and within noise of it on clinc150 (0.955 to 0.953) and MR (0.794 to 0.793); without any,
TREC fine and MR are within noise of 0.3. Within noise or worse: feature scales 1 and 3, feature
dropout 0.7, windows 1-3 and 3-5, dropout 0.3, smoothed labels, averaged weights, other shares of
the two parts.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import msgspec

Size = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class TextSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the net and how it is trained; the model file has a copy."""

    text_words: Size = 256  # the first of a text
    most_words: int = 100_000  # the most frequent of all
    dimensions: Size = 128
    embedding_range: float = 0.25  # of initial values, either side of 0 (Kim, 2014)
    windows: Annotated[tuple[Size, ...], msgspec.Meta(min_length=1)] = (2, 3, 4)
    maps: Size = 100
    dropout: float = 0.5
    rare_words: float = 1.0  # α: a word seen n times is unknown with probability α/(α + n)
    characters: tuple[Size, Size] = (2, 5)  # n-grams within words, shortest and longest
    least_rows: int = 2  # that a character n-gram is in
    feature_scale: float = 2.0
    feature_dropout: float = 0.3
    most_weights: int = 16_000_000  # of the wide part
    rate: float = 0.02  # at the start; it falls to 0, so that its mean is Table 3's 0.01
    held_out: float = 0.1
    least_held_from: int = 50  # rows; with fewer, none are held out
    last_epochs: float = 0.1  # the share of epochs that held-out rows take part in
    least_updates: int = 1_000
    temperatures: tuple[float, float] = (1.0, 0.25)  # deep and wide, without held-out rows


class JobSetting(msgspec.Struct, frozen=True):
    """``job.json``: what the operator may change. Without a batch, the rows decide."""

    epochs: int = 200
    batch: int | None = None
    seed: int = 0
    max_model_bytes: int = 256 << 20


class Schedule(NamedTuple):
    """How many updates the two phases take.

    Attributes:
        batch: Rows an update; by default by the paper's Table 3.
        first: Updates without the held-out rows.
        total: Updates in all.
    """

    batch: int
    first: int
    total: int

    @classmethod
    def of(cls, job: JobSetting, setting: TextSetting, trained: int, held: int) -> Schedule:
        """The schedule for ``trained`` rows and ``held`` ones, which join in the last epochs.

        >>> Schedule.of(JobSetting(), TextSetting(), 900, 100)
        Schedule(batch=2, first=81000, total=91000)
        >>> Schedule.of(JobSetting(epochs=1), TextSetting(), 40, 0).total
        1000
        """
        rows = trained + held
        batch = job.batch or (2 if rows < 10_000 else 4 if rows <= 100_000 else 32)
        share = setting.last_epochs if held else 1.0
        first = math.ceil(job.epochs * (1 - share) * trained / batch)
        total = first + math.ceil(job.epochs * share * rows / batch)
        if total < setting.least_updates:
            first = first * setting.least_updates // total
        return cls(batch, first, max(total, setting.least_updates))
