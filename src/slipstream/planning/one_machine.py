"""How learners of one machine train on weights that they share. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from slipstream.errors import ConfigError

Apply = Literal["server", "direct"]


@dataclass(frozen=True, slots=True)
class OneMachine:
    """``slots`` is how many gradients a learner may have made that are not applied yet."""

    apply: Apply = "server"
    consistent: bool = False
    slots: int = 2
    checkpoints: str | None = None  # a directory; by default one that goes with the job
    every_s: float = 30.0

    def __post_init__(self) -> None:
        if self.apply not in ("server", "direct"):
            raise ConfigError(f"apply={self.apply!r}: choose 'server' or 'direct'")
        if not isinstance(self.consistent, bool):
            raise ConfigError(f"consistent={self.consistent!r}: choose True or False")
        if type(self.slots) is not int or not 1 <= self.slots <= 64:
            raise ConfigError(f"slots={self.slots!r}: choose a whole number from 1 to 64")
        if self.checkpoints is not None and not (
            isinstance(self.checkpoints, str) and self.checkpoints
        ):
            raise ConfigError(f"checkpoints={self.checkpoints!r}: give the path of a directory")
        if not isinstance(self.every_s, int | float) or not 0 < self.every_s < math.inf:
            raise ConfigError(f"every_s={self.every_s!r}: give seconds, more than 0")
