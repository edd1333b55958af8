"""Workers that exchange all the time, and only wait when one is far behind. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from slipstream.consistency.protocol import Book, Progress
from slipstream.errors import ConfigError, IncompatibleRoute
from slipstream.types import Rank

STEPS_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class WithinReach:
    """A worker begins step c only when c < min over peers of the last step heard of + p + τ.

    p steps pass before a peer has got everything of one; τ is for networks and steps that are not
    all alike (None: four for each worker). Peers are those that live: one that has died is not
    waited for. Nobody holds a round, so there are no books.
    """

    tau: int | None = None

    def __post_init__(self) -> None:
        if self.tau is not None and (type(self.tau) is not int or self.tau < 0):
            raise ConfigError(f"a staleness of {self.tau!r}: give a number of steps, 0 or more")

    def may_begin(self, step: int, heard: Mapping[Rank, int], partitions: int) -> bool:
        """``heard``: by peer, how many steps it is known to have made."""
        assert self.tau is not None
        return not heard or step < min(heard.values()) + partitions + self.tau

    def clock(self, slices: int, beat: int, partitions: int) -> int:
        """The steps of a peer of which slices tell, and heartbeats: slices leave from the training
        thread, which may do something else for long. As much may be under way as workers may be
        apart, so that updates are not older than twice that."""
        assert self.tau is not None
        return max(slices, min(beat, slices + partitions + self.tau))

    @property
    def lockstep(self) -> bool:
        return False

    @property
    def alone(self) -> bool:
        return False

    @property
    def agreed(self) -> bool:
        return False

    @property
    def under_way(self) -> int:
        return 0

    def among(self, workers: int) -> WithinReach:
        return self if self.tau is not None else replace(self, tau=STEPS_PER_WORKER * workers)

    def may_start(self, progress: Progress) -> bool:
        return True

    def follows(self, *, seen: int, begun: int, result: int) -> bool:
        return True

    def book(self, workers: int) -> Book:
        raise IncompatibleRoute("slices go from worker to worker: nobody holds a round of them")

    def rate(self, staleness: int) -> float:
        return 1.0
