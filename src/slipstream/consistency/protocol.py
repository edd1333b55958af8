"""What rounds are counted in: ledgers, and what they say of a closed round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slipstream.types import Rank


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a worker stands with one unit: the round it wants to begin, the rounds committed."""

    round: int
    committed: int


@dataclass(frozen=True, slots=True)
class Closed:
    """A round that closed: the contributions that make it, by clock and rank, in the order in which
    they are summed; what their sum is divided by; who gets the result (None: everybody); and who of
    these gets it for a contribution that did not count."""

    contributions: tuple[tuple[int, Rank], ...]
    divisor: int
    audience: tuple[Rank, ...] | None = None
    dropped: tuple[Rank, ...] = ()


class RoundLedger(Protocol):
    """One unit's rounds, as whoever aggregates it counts them."""

    @property
    def round(self) -> int:
        """The open one: as many have closed."""
        ...

    def arrive(self, rank: Rank, clock: int) -> bool:
        """Enter a contribution for round ``clock``.

        Returns:
            Whether it counts, now or later; one that is too late does not.

        Raises:
            FrameRefused: It fits no round.
        """
        ...

    def retire(self, rank: Rank) -> None:
        """A worker has left: no round waits for it any more."""
        ...

    def close(self) -> Closed | None:
        """Close the open round if it is complete; then the next is open."""
        ...
