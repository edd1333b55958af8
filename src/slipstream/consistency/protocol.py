"""The interface of ledgers, which count rounds, and their report of a closed round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slipstream.types import Rank


@dataclass(frozen=True, slots=True)
class Progress:
    """A worker's position in one unit: the round it wants to begin, and the rounds committed."""

    round: int
    committed: int


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed round: its contributions, by clock and rank, in the order in which they are
    summed; the divisor of the sum; who gets the result (None: all workers); and which of these get
    it for a contribution that did not count."""

    contributions: tuple[tuple[int, Rank], ...]
    divisor: int
    audience: tuple[Rank, ...] | None = None
    dropped: tuple[Rank, ...] = ()


class RoundLedger(Protocol):
    """Counts one unit's rounds, at its aggregator."""

    @property
    def round(self) -> int:
        """The open round; so many have closed."""
        ...

    def arrive(self, rank: Rank, clock: int) -> bool:
        """Enter a contribution for round ``clock``.

        Returns:
            Whether it counts, now or later; one that is too late does not.

        Raises:
            FrameRefused: It matches no round.
        """
        ...

    def retire(self, rank: Rank) -> None:
        """A worker has left: rounds no longer wait for it."""
        ...

    def close(self) -> Closed | None:
        """Close the open round if it is complete; the next is then open."""
        ...
