"""``progress.jsonl``: how far a training job is, a line at a time.

Each line is one write, so a reader sees whole lines but for the last. A job that was killed may
have left a part of a line; the next one ends it first.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

EVERY_S = 1.0


class Progress(msgspec.Struct, kw_only=True):
    """One line.

    Attributes:
        updates: Updates so far, by all learners.
        total: Updates at the end.
        epoch: Passes over the data so far.
        epochs: Passes at the end.
        samples_s: Rows a second, since the line before.
        loss: The mean since the line before; null if there is none.
        accuracy: Of training batches, in the same time.
        held_accuracy: Of held-out rows; null if not measured at this line.
        at: Milliseconds since 1970.
    """

    updates: int
    total: int
    epoch: int
    epochs: int
    samples_s: float
    loss: float | None = None
    accuracy: float | None = None
    held_accuracy: float | None = None
    at: int = 0


class ProgressFile:
    """Appends lines, at most one a second.

    Args:
        path: The file; made if it is not there.
        total: Updates at the end.
        epochs: Passes over the data at the end.
        batch: Rows an update.
    """

    def __init__(self, path: Path, total: int, epochs: int, batch: int) -> None:
        self._total, self._epochs, self._batch = total, epochs, batch
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            os.write(self._handle, b"\n")
        self._at = time.monotonic()
        self._updates: int | None = None
        self._losses: list[float] = []
        self._right = self._seen = 0

    def record(self, loss: float, right: int, rows: int) -> None:
        """Count a training batch."""
        self._losses.append(loss)
        self._right += right
        self._seen += rows

    @property
    def due(self) -> bool:
        """Whether a second has passed since the last line."""
        return time.monotonic() - self._at >= EVERY_S

    def write(self, updates: int, held_accuracy: float | None = None) -> None:
        """Append a line about what was recorded since the last one."""
        now, before = time.monotonic(), self._updates
        done = 0 if before is None else max(updates - before, 0)
        line = Progress(
            updates=min(updates, self._total),
            total=self._total,
            epoch=min(updates * self._epochs // self._total, self._epochs),
            epochs=self._epochs,
            samples_s=round(done * self._batch / max(now - self._at, 1e-3), 1),
            loss=sum(self._losses) / len(self._losses) if self._losses else None,
            accuracy=self._right / self._seen if self._seen else None,
            held_accuracy=held_accuracy,
            at=time.time_ns() // 1_000_000,
        )
        os.write(self._handle, msgspec.json.encode(line) + b"\n")
        self._at, self._updates = now, updates
        self._losses, self._right, self._seen = [], 0, 0
