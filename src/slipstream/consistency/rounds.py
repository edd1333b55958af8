"""Bulk-synchronous rounds."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.consistency.protocol import Progress


@dataclass(frozen=True, slots=True)
class Rounds:
    """Round t closes when all n workers have contributed to it; nobody starts t+1 before that."""

    def may_start(self, progress: Progress) -> bool:
        return progress.round <= progress.committed

    def admits(self, *, open_round: int, arrived: int) -> bool:
        # On a mesh a peer may close round t before this holder does, and be one round ahead.
        return open_round <= arrived <= open_round + 1

    def quorum(self, workers: int) -> int:
        return workers
