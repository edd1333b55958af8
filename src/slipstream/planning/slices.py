"""The number of partitions of an update, from the rate of links (Ako's cost model). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.errors import ConfigError

FULL = 0.9  # of a link; above it, queueing dominates
WORTH_CHANGING = 0.2  # relative change of bandwidth or step time before p is recomputed


@dataclass(frozen=True, slots=True)
class Load:
    """The load of links: γ steps/s of a worker, a model of m bytes, n workers, B bytes/s a link."""

    steps_s: float
    model_bytes: float
    workers: int
    bytes_s: float

    def __post_init__(self) -> None:
        for name in ("steps_s", "model_bytes", "bytes_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)!r}: give a number above 0")

    def used_bytes_s(self, partitions: int) -> float:
        """Return γ·m·(n − 1) / p, the load of a worker's link, each way."""
        return self.steps_s * self.model_bytes * (self.workers - 1) / partitions

    def partitions(self) -> int:
        """Return p = ⌈γ·m·(n − 1) / (0.9·B)⌉, the fewest with which the link is not overloaded."""
        return max(1, math.ceil(self.used_bytes_s(1) / (FULL * self.bytes_s)))

    def differs(self, other: Load) -> bool:
        """Return whether p should be recomputed: the number of workers or a rate has changed."""
        if self.workers != other.workers:
            return True
        pairs = ((self.steps_s, other.steps_s), (self.bytes_s, other.bytes_s))
        return any(abs(new / old - 1) > WORTH_CHANGING for old, new in pairs)
