"""What a consistency model answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a worker stands with one chunk: the round it wants to begin, the rounds committed."""

    round: int
    committed: int


class Consistency(Protocol):
    """A frozen rule; runtimes ask it and do the waiting."""

    def may_start(self, progress: Progress) -> bool:
        """May this worker read the chunk to begin ``progress.round``?"""
        ...

    def admits(self, *, open_round: int, arrived: int) -> bool:
        """Does a contribution tagged ``arrived`` count (now or later) while another is open?"""
        ...

    def quorum(self, workers: int) -> int:
        """How many contributions close a round."""
        ...
