"""How fast a job is, by its lines of progress, so that the time left does not jump. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

SLICE_MS: Final = 5_000
SLICES: Final = 36  # three minutes: a machine that becomes busy is noticed within these


class Pace:
    """Updates a second of late: the mean over slices of time, without the outer quarters.

    A stall of some slices, or a burst, is left out; a load that stays comes in bit by bit. It
    begins with the first line, so the start of the processes does not count.

    >>> pace = Pace()
    >>> for second in range(60):
    ...     pace.add(at=1000 * second, updates=20 * second)
    >>> pace.updates_s
    20.0
    """

    def __init__(self) -> None:
        self._slices: deque[float] = deque(maxlen=SLICES)
        self._at: int | None = None  # where the open slice begins
        self._updates = 0
        self._open = 0.0  # the rate of the open slice, until one is complete

    def add(self, *, at: int, updates: int) -> None:
        """Count a line: the job's updates so far, at a time in milliseconds."""
        if self._at is None or at < self._at or updates < self._updates:  # also: a clock set back
            self._at, self._updates = at, updates
            return
        self._open = 1000 * (updates - self._updates) / max(at - self._at, 1)
        if at - self._at >= SLICE_MS:
            self._slices.append(self._open)
            self._at, self._updates = at, updates

    @property
    def updates_s(self) -> float:
        """The rate; 0 while it is not known."""
        if not self._slices:
            return self._open
        cut = len(self._slices) // 4
        kept = sorted(self._slices)[cut : len(self._slices) - cut]
        return sum(kept) / len(kept)
