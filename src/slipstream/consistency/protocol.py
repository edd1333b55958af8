"""The interface of ledgers, which count rounds, and their report of a closed round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slipstream.types import Rank


@dataclass(frozen=True, slots=True)
class Progress:
    """A worker's position in one unit: the round it is about to begin, and the rounds committed."""

    round: int
    committed: int


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed round.

    Attributes:
        contributions: Clock and rank of each contribution, in the order in which they are summed.
        divisor: The number by which the sum is divided.
        audience: The workers that get the result; None for all.
        dropped: Those of them that get it for a contribution that did not count.
    """

    contributions: tuple[tuple[int, Rank], ...]
    divisor: int
    audience: tuple[Rank, ...] | None = None
    dropped: tuple[Rank, ...] = ()


class RoundLedger(Protocol):
    """The count of one unit's rounds, at its aggregator."""

    @property
    def round(self) -> int:
        """The number of the open round, which is the number of closed rounds."""
        ...

    def arrive(self, rank: Rank, clock: int) -> bool:
        """Enter a contribution for round ``clock``.

        Returns:
            True if it counts, now or later; False if it is too late.

        Raises:
            FrameRefused: It matches no round.
        """
        ...

    def retire(self, rank: Rank) -> None:
        """Remove a worker that has left: rounds no longer wait for it."""
        ...

    def close(self) -> Closed | None:
        """Close the open round if it is complete, and open the next; return None if it is not."""
        ...
