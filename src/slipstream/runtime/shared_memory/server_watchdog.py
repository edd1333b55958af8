"""Detects that the server of shared weights makes no progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream._native import Rings

START_S = 120.0  # for a server to be ready, and for a request that may take long
SILENCE_S = 5.0


@dataclass(slots=True)
class ServerWatchdog:
    """Watches counters in the rings that change while the server works."""

    clock: Callable[[], float]
    _seen: tuple[int, ...] = ()
    _since: float = 0.0

    def restart(self) -> None:
        """A server was started, or gets more time."""
        self._seen, self._since = (), self.clock()

    def is_late(self) -> bool:
        """Whether a server that was started should be ready by now."""
        return self.clock() - self._since > START_S

    def stalled_s(self, rings: Rings, *, busy: bool) -> float | None:
        """The time limit, if the server has made no progress for longer; else None.

        Args:
            busy: whether a request may keep the server from applying gradients.
        """
        waiting = [r for r in range(rings.learners) if rings.pushed(r) != rings.taken(r)]
        seen = (rings.version, *(rings.taken(r) for r in waiting))
        if busy or not waiting:
            seen = (*seen, rings.beat)
        if seen != self._seen:
            self._seen, self._since = seen, self.clock()
        allowed_s = START_S if busy else SILENCE_S
        return allowed_s if self.clock() - self._since > allowed_s else None
