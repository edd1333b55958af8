"""When a worker may begin its next step. Frozen and pure: runtimes call gates, and wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import msgspec

from slipstream.consistency.protocol import Progress
from slipstream.errors import ConfigError
from slipstream.parts import Facts, Part, facts
from slipstream.types import Rank

STEPS_PER_WORKER = 4
MOST_STEPS = 1000  # ahead: contributions in flight need memory


class Gate(Part, frozen=True):
    """When a worker may begin its next step. ``under_way``: how many contributions to a unit it may
    have made whose results it has not applied."""

    def among(self, workers: int) -> Self:
        """The same with values that depend on the number of workers filled in."""
        return self

    def may_start(self, progress: Progress) -> bool:
        """Whether a worker may begin its next round of a unit."""
        return True


class Lag(Gate, frozen=True):
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
        return self.steps + 1

    def may_start(self, progress: Progress) -> bool:
        return progress.round <= progress.committed + self.steps


class LagBehindPeers(Gate, frozen=True):
    """A worker begins step c only when c < min over its peers of their last known step + p + τ.

    A peer has everything of one step only after p steps. Only live peers count.

    Args:
        extra: τ, for uneven networks and step times. None: four for each worker.

    Raises:
        ConfigError: τ is negative or no whole number.

    >>> LagBehindPeers(extra=2).may_begin(step=4, known={1: 0, 2: 9}, partitions=2)
    False
    """

    extra: int | None = None

    under_way: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.extra is not None and (type(self.extra) is not int or self.extra < 0):
            raise ConfigError(f"a staleness of {self.extra!r}: give a number of steps, 0 or more")

    def facts(self) -> Facts:
        return facts("bounded lead over peers")

    def among(self, workers: int) -> Self:
        if self.extra is not None:
            return self
        return msgspec.structs.replace(self, extra=STEPS_PER_WORKER * workers)

    def may_begin(self, step: int, known: Mapping[Rank, int], partitions: int) -> bool:
        """Whether step ``step`` may begin; ``known``: the number of steps of each peer."""
        return not known or step < min(known.values()) + self._reach(partitions)

    def clock(self, updates: int, beat: int, partitions: int) -> int:
        """The steps a peer is known to have made, from its updates and from its heartbeats.

        The training thread sends updates and may be busy elsewhere; heartbeats have their own
        thread. At most p + τ steps may be in flight, so an update is at most 2(p + τ) steps old.
        """
        return max(updates, min(beat, updates + self._reach(partitions)))

    def _reach(self, partitions: int) -> int:
        if self.extra is None:
            raise ConfigError("LagBehindPeers: how many workers there are is not known yet")
        return partitions + self.extra


class NoWait(Gate, frozen=True):
    """A worker never waits."""

    under_way: ClassVar[int] = 1

    def facts(self) -> Facts:
        return facts("waits for nobody")


# Every gate that a strategy may name.
AnyGate = Lag | LagBehindPeers | NoWait
