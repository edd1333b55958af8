"""Timing of gradients: when the k-th of a round arrives, how long steps take. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from slipstream.types import Rank

KEPT_STEPS = 1024  # durations kept, by worker
KEPT_ROUNDS = 1024  # rounds kept, since a gradient may arrive long after its round closed
FINEST_S = 1e-4
PER_DOUBLING = 4


@dataclass(slots=True)
class Histogram:
    """Counts of durations, in bins of which four make a doubling."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float) -> None:
        place = math.ceil(PER_DOUBLING * math.log2(max(seconds, FINEST_S) / FINEST_S))
        self.counts[place] += 1

    def quantile(self, share: float) -> float:
        """Return the duration that this share does not exceed, to the precision of bins."""
        wanted = share * self.counts.total()
        counted = 0
        for place in sorted(self.counts):
            counted += self.counts[place]
            if counted >= wanted:
                return self._upper_s(place)
        return math.nan

    @staticmethod
    def _upper_s(place: int) -> float:
        return float(FINEST_S * 2 ** (place / PER_DOUBLING))

    def as_pairs(self) -> list[tuple[float, int]]:
        """Return the upper ends of bins in seconds, with their counts."""
        return [(round(self._upper_s(place), 6), n) for place, n in sorted(self.counts.items())]


@dataclass(slots=True)
class Arrivals:
    """Times of gradients, recorded at the holder that decides rounds."""

    opened_at: dict[int, float] = field(default_factory=dict)  # by round
    served_at: dict[Rank, float] = field(default_factory=dict)
    came: Counter[int] = field(default_factory=Counter)  # by round
    kth: dict[int, Histogram] = field(default_factory=dict)  # by k, from 1
    durations: dict[Rank, deque[float]] = field(default_factory=dict)

    def opened(self, round_: int, now: float) -> None:
        self.opened_at[round_] = now
        self.opened_at.pop(round_ - KEPT_ROUNDS, None)
        self.came.pop(round_ - KEPT_ROUNDS, None)

    def served(self, rank: Rank, now: float) -> None:
        """Record that a worker has the weights to begin a step."""
        self.served_at[rank] = now

    def arrived(self, rank: Rank, round_: int, now: float) -> None:
        """Record that a worker's gradient has arrived."""
        if (start := self.served_at.pop(rank, None)) is not None:
            steps = self.durations.setdefault(rank, deque(maxlen=KEPT_STEPS))
            steps.append(max(now - start, FINEST_S))
        if (opened := self.opened_at.get(round_)) is not None:
            self.came[round_] += 1
            self.kth.setdefault(self.came[round_], Histogram()).add(now - opened)
