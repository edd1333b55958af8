"""What a consistency model answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slipstream.types import Rank


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a worker stands with one chunk: the round it wants to begin, the rounds committed."""

    round: int
    committed: int


@dataclass(frozen=True, slots=True)
class Closed:
    """A round that closed: the contributions that make it, by clock and rank, in the order in which
    they are summed; what their sum is divided by; and who gets the result (None: everybody)."""

    contributions: tuple[tuple[int, Rank], ...]
    divisor: int
    audience: tuple[Rank, ...] | None = None


class Book(Protocol):
    """One chunk's rounds as its holder keeps them."""

    @property
    def round(self) -> int:
        """The open one: as many have closed."""
        ...

    def arrive(self, rank: Rank, clock: int) -> bool:
        """A contribution tagged ``clock``: whether it counts, now or later. One that is too late
        does not; one that fits nowhere raises FrameRefused."""
        ...

    def retire(self, rank: Rank) -> None:
        """A worker has left: nothing waits for it any more."""
        ...

    def close(self) -> Closed | None:
        """The open round, if it is complete; then the next is open."""
        ...


class Consistency(Protocol):
    """A frozen rule; runtimes ask it and do the waiting."""

    @property
    def lockstep(self) -> bool:
        """Whether all workers make every round, so that one that falls out of step is an error.

        Otherwise results are whole: a worker may not have seen all that came before.
        """
        ...

    @property
    def alone(self) -> bool:
        """Whether every gradient is an update of its own."""
        ...

    @property
    def agreed(self) -> bool:
        """Whether holders must agree on who made a round before any of them closes it."""
        ...

    @property
    def under_way(self) -> int:
        """How many contributions to a chunk a worker may have made that are not answered yet."""
        ...

    def among(self, workers: int) -> Consistency:
        """The same rule with what depends on the number of workers filled in, or ConfigError."""
        ...

    def may_start(self, progress: Progress) -> bool:
        """May this worker read the chunk to begin ``progress.round``?"""
        ...

    def follows(self, *, seen: int, begun: int, result: int) -> bool:
        """May a worker that has seen the results of ``seen`` rounds, and begun ``begun``, be sent
        the one of round ``result`` now?"""
        ...

    def book(self, workers: int) -> Book:
        """An empty one, for one chunk."""
        ...

    def rate(self, staleness: int) -> float:
        """What the learning rate is multiplied by for a gradient this many updates old."""
        ...
