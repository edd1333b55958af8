"""The busy time of an emulated device, accurate to microseconds over any number of waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A sleep ends late by about 70 µs; so it ends early, and the rest is spent in a busy loop.
SPIN_S = 0.0001
# A real device gets its work ahead of time, which hides the host's work between two layers. A
# longer gap is no overhead: the host was waiting, for the network or for a straggler.
SLACK_S = 0.0005


class Timeline:
    """The work of one device, one piece after the other.

    Waits are measured against the device's own time, not against the start of a wait: if a sleep
    or the host was late with one piece, the next one is shorter. Lateness is carried over
    stalls too, but a stall itself is not caught up.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        spin_s: float = SPIN_S,
        slack_s: float = SLACK_S,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._spin_s = spin_s
        self._slack_s = slack_s
        self._busy_until: float | None = None
        self._idle_since = 0.0
        self.busy_s = 0.0
        self.worst_late_s = 0.0

    @property
    def late_s(self) -> float:
        """The current lateness; if it is far above a layer's time, the machine is too busy."""
        return 0.0 if self._busy_until is None else self._idle_since - self._busy_until

    def run(self, seconds: float) -> None:
        """Return when the device is done with a piece of work of this length."""
        arrived = self._clock()
        if self._busy_until is None:
            self._busy_until = self._idle_since = arrived
        gap = arrived - self._idle_since
        if gap > self._slack_s:
            self._busy_until += gap
        self._busy_until += seconds
        self.busy_s += seconds
        self._wait_until(self._busy_until)
        self._idle_since = self._clock()
        self.worst_late_s = max(self.worst_late_s, self.late_s)

    @contextmanager
    def included(self) -> Iterator[None]:
        """Carry over the work in the block, which the device's published speed already includes."""
        start = self._clock()
        yield
        self._idle_since += self._clock() - start

    def _wait_until(self, moment: float) -> None:
        remaining = moment - self._clock()
        if remaining > self._spin_s:
            self._sleep(remaining - self._spin_s)
        while self._clock() < moment:
            pass
