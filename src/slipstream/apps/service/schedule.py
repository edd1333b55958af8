"""How many updates a training job makes, and at which rate. Pure: no files, no clock.

    updates   0 ────────────── stop ──── first ──────────── total
    rows      all but the held-out ones  │      all of them
    rate      falls towards 0 │ to 0     │      as in the last updates of all epochs

Without an early stop the rate falls evenly over all epochs, and the final pass over all rows is the
last tenth of them. Where held-out accuracy has not improved for ``patience_epochs``, the rate falls
to 0 within ``FALL_EPOCHS`` instead, and the same final pass follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.apps.service.settings import JobSetting, TextSetting

FALL_EPOCHS = 5


class Point(NamedTuple):
    """A point of the curve: held-out accuracy after so many updates."""

    update: int
    accuracy: float


class Schedule(NamedTuple):
    """The updates of a job, and when its parts begin.

    Attributes:
        batch: Rows an update; by default by the paper's Table 3.
        first: Updates without the held-out rows.
        total: Updates in all.
        epochs: Passes over the data if it does not stop early.
        planned: Updates of these passes.
        stop: The update from which the rate falls to 0 early, if it does.
    """

    batch: int
    first: int
    total: int
    epochs: int
    planned: int
    stop: int | None = None

    @classmethod
    def of(cls, job: JobSetting, setting: TextSetting, trained: int, held: int) -> Schedule:
        """The schedule for ``trained`` rows and ``held`` ones, which join in the last epochs.

        >>> Schedule.of(JobSetting(), TextSetting(), 900, 100)[:3]
        (2, 81000, 91000)
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
        total = max(total, setting.least_updates)
        return cls(batch, first, total, job.epochs, total)

    @property
    def last_epoch(self) -> int:
        """The number of passes that are made."""
        return self.epoch(self.total)

    def epoch(self, update: int) -> int:
        """The passes over the data that are complete after so many updates.

        >>> Schedule(2, 81000, 91000, 200, 91000).epoch(45500)
        100
        """
        return min(update * self.epochs // self.planned, self.epochs)

    def rate(self, update: int) -> float:
        """The share of the first rate that an update is made with.

        >>> early = Schedule(2, 90, 100, 10, 100).stopped_from(20)
        >>> early.stop, early.first, early.total
        (20, 70, 80)
        >>> [early.rate(update) for update in (0, 10, 20, 45, 70, 75, 80)]
        [1.0, 0.9, 0.8, 0.4, 0.1, 0.05, 0.0]
        """
        if self.stop is not None and self.stop <= update < self.first:
            share = (self.first - update) / (self.first - self.stop)
            return share * (1 - self.stop / self.planned)
        left = self.planned - update if update < self.first else self.total - update
        return max(left / self.planned, 0.0)

    def stopped_from(self, update: int) -> Schedule:
        """The schedule if the rate falls to 0 from an update on; self if that takes no fewer."""
        first = update + math.ceil(FALL_EPOCHS * self.planned / self.epochs)
        if first >= self.first:
            return self
        return self._replace(first=first, total=first + self.total - self.first, stop=update)

    def after(self, curve: Sequence[Point], job: JobSetting) -> Schedule:
        """The schedule that follows from a curve; ``self`` is the one without a stop.

        A curve that goes on changes nothing any more, so every process that has seen the same
        beginning of it, or more, has the same schedule.
        """
        update = stalled_at(curve, self._patience(job), job.least_updates_to_stop)
        return self if update is None else self.stopped_from(update)

    def may_stop(self, curve: Sequence[Point], job: JobSetting, update: int) -> bool:
        """Whether the rate may still fall to 0 early, after so many updates.

        >>> job, schedule = JobSetting(least_updates_to_stop=0), Schedule(2, 90, 100, 100, 100)
        >>> [schedule.may_stop([Point(best, 0.5)], job, 60) for best in (20, 24, 25)]
        [True, True, False]
        """
        best = max(curve, key=lambda point: point.accuracy, default=Point(0, 0.0))
        first = max(update, best.update + self._patience(job), job.least_updates_to_stop)
        return self.stop is None and self.stopped_from(first) is not self

    def _patience(self, job: JobSetting) -> int:
        """Updates without a better held-out accuracy after which it stops."""
        return math.ceil(job.patience_epochs * self.planned / self.epochs)


def stalled_at(curve: Sequence[Point], patience: int, least: int = 0) -> int | None:
    """The first update, from ``least`` on, at which the best accuracy is ``patience`` updates old.

    None if there is none so far.

    >>> stalled_at([Point(10, 0.7), Point(20, 0.8), Point(30, 0.8), Point(40, 0.75)], 20)
    40
    >>> stalled_at([Point(10, 0.7), Point(20, 0.8), Point(30, 0.81), Point(40, 0.75)], 20)
    """
    best = Point(0, -1.0)
    for point in curve:
        if point.accuracy > best.accuracy:
            best = point
        elif point.update >= max(best.update + patience, least):
            return point.update
    return None
