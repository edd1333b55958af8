"""``progress.jsonl``: how far a training job is, a line at a time.

Each line is one write, so a reader sees whole lines but for the last. A job that was killed may
have left a part of a line; the next one ends it first.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from slipstream.apps.service.schedule import Schedule

FILE = "progress.jsonl"
EVERY_S = 1.0
NOTE = "job: "  # how lines of the log begin that tell how the job goes, not why it ended


class Progress(msgspec.Struct, frozen=True):
    """A line: updates of all learners, passes over the data, and what was measured since the last.

    ``at`` is in milliseconds since 1970.
    """

    updates: int
    total: int
    epoch: int
    epochs: int
    samples_s: float
    at: int
    loss: float | None = None
    accuracy: float | None = None
    held_accuracy: float | None = None


class ProgressFile:
    """Appends lines, at most one a second, to a file that may be new."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            os.write(self._handle, b"\n")
        self._at, self._updates = time.monotonic(), -1  # of the line before
        self._loss, self._right, self._seen = 0.0, 0, 0  # summed over rows since then

    def record(self, loss: float, right: int, rows: int) -> None:
        """Count a training batch: its mean loss, right answers and rows."""
        self._loss += loss * rows
        self._right += right
        self._seen += rows

    @property
    def due(self) -> bool:
        """Whether a second has passed since the last line."""
        return time.monotonic() - self._at >= EVERY_S

    def write(self, schedule: Schedule, updates: int, held_accuracy: float | None = None) -> None:
        """Append a line: all learners' updates so far, and what was recorded since the last one.

        The epochs and updates in all are those of the schedule: fewer, once it stops early.
        """
        now = time.monotonic()
        done = max(updates - self._updates, 0) if self._updates >= 0 else 0
        line = Progress(
            updates=min(updates, schedule.total),
            total=schedule.total,
            epoch=min(schedule.epoch(updates), schedule.last_epoch),
            epochs=schedule.last_epoch,
            samples_s=round(done * schedule.batch / max(now - self._at, 1e-3), 1),
            at=time.time_ns() // 1_000_000,
            loss=self._loss / self._seen if self._seen else None,
            accuracy=self._right / self._seen if self._seen else None,
            held_accuracy=held_accuracy,
        )
        os.write(self._handle, msgspec.json.encode(line) + b"\n")
        self._at, self._updates = now, updates
        self._loss, self._right, self._seen = 0.0, 0, 0
