"""A clock that only moves by ``advance``."""

from __future__ import annotations


class VirtualClock:
    """A clock that is called for the time in seconds, as ``time.monotonic`` is.

    >>> clock = VirtualClock()
    >>> clock.advance(1.5)
    >>> clock()
    1.5
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
