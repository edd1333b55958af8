"""Gates: when a worker may begin its next round. Frozen and pure: runtimes ask, and wait."""

from __future__ import annotations

from slipstream.consistency.protocol import Progress
from slipstream.errors import ConfigError
from slipstream.parts import Facts, Part, facts

MOST_STEPS = 1000  # of lag: contributions in flight need memory


class Lag(Part, frozen=True):
    """A worker begins round c when the results of all rounds up to c − s − 1 are applied.

    Args:
        steps: s. 0 is lockstep.

    Raises:
        ConfigError: s is negative, or would need too much memory.

    >>> Lag(1).may_start(Progress(round=3, committed=2)), Lag(1).may_start(Progress(4, 2))
    (True, False)
    """

    steps: int = 0

    def __post_init__(self) -> None:
        if type(self.steps) is not int or not 0 <= self.steps <= MOST_STEPS:
            raise ConfigError(
                f"a staleness bound of {self.steps!r}: give a whole number from 0 to {MOST_STEPS}"
            )

    def facts(self) -> Facts:
        return facts("may run ahead") if self.steps else facts()

    @property
    def under_way(self) -> int:
        """The most contributions of a worker to a unit whose results it has not applied."""
        return self.steps + 1

    def may_start(self, progress: Progress) -> bool:
        """Return whether a worker may begin its next round of a unit."""
        return progress.round <= progress.committed + self.steps
