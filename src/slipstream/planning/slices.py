"""Into how many partitions an update is cut, from what links carry (Ako's cost model). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from slipstream.errors import ConfigError

FULL = 0.9  # of a link; nearer to all of it the queue decides, not the rate
WORTH_CHANGING = 0.2  # how far bandwidth or steps may move before p is worked out again
Growth = Literal["none", "sqrt", "linear"]
GROWTHS: dict[Growth, float] = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True, slots=True)
class Slices:
    """How workers send each other slices of their updates.

    ``partitions`` None: as many as the links ask for. ``bytes_s`` is what a worker's link carries;
    None: it is measured. An update counts 1/n, so that n workers move as far as the mean of their
    updates would; ``growth`` makes that √n or n times as far, reached after ``warm_steps``.
    """

    partitions: int | None = None
    same_for_all: bool = False
    growth: Growth = "none"
    warm_steps: int = 0
    bytes_s: float | None = None

    def __post_init__(self) -> None:
        if self.partitions is not None and (
            type(self.partitions) is not int or self.partitions < 1
        ):
            raise ConfigError(
                f"partitions={self.partitions!r}: give a number, 1 or more, or 'auto'"
            )
        if self.growth not in GROWTHS:
            raise ConfigError(f"growth={self.growth!r}: choose one of {', '.join(GROWTHS)}")
        if type(self.warm_steps) is not int or self.warm_steps < 0:
            raise ConfigError(f"warm_steps={self.warm_steps!r}: give a number of steps, 0 or more")

    def coefficient(self, step: int, workers: int) -> float:
        """What every worker's update counts, with itself and with its peers."""
        full = workers ** GROWTHS[self.growth]
        warmth = min(1.0, step / self.warm_steps) if self.warm_steps else 1.0
        return float((1.0 + (full - 1.0) * warmth) / workers)


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
