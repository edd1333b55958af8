"""Into how many partitions an update is cut, from what links carry (Ako's cost model). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.errors import ConfigError

FULL = 0.9  # of a link; nearer to all of it the queue decides, not the rate
WORTH_CHANGING = 0.2  # how far bandwidth or steps may move before p is worked out again


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's steps a second γ, the model's bytes m, n workers, and a link's bytes/s B."""

    steps_s: float
    model_bytes: float
    workers: int
    bytes_s: float

    def __post_init__(self) -> None:
        for name in ("steps_s", "model_bytes", "bytes_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)!r}: give a number above 0")

    def used_bytes_s(self, partitions: int) -> float:
        """γ·m·(n − 1) / p: what a worker's link carries each way, if it can."""
        return self.steps_s * self.model_bytes * (self.workers - 1) / partitions

    def partitions(self) -> int:
        """p = ⌈γ·m·(n − 1) / (0.9·B)⌉: the fewest with which the link keeps up."""
        return max(1, math.ceil(self.used_bytes_s(1) / (FULL * self.bytes_s)))

    def differs(self, other: Load) -> bool:
        """Whether p should be worked out again: other workers, or a fifth more or less."""
        if self.workers != other.workers:
            return True
        pairs = ((self.steps_s, other.steps_s), (self.bytes_s, other.bytes_s))
        return any(abs(new / old - 1) > WORTH_CHANGING for old, new in pairs)
