"""Plain gradient descent over outer rounds."""

from __future__ import annotations

from slipstream.outer_optimizers.outer_optimizer import Array, OuterOptimizer, State, check_rate
from slipstream.outer_optimizers.place import At


class SGD(OuterOptimizer, frozen=True):
    """Move the outer weights along the mean outer gradient.

        θ ← θ − η Δ

    With η = 1 the outer weights become the mean of the workers' weights (local SGD).

    Args:
        lr: η, above 0.
        at: "worker": every worker updates. "server": the servers update, and send back θ.

    Raises:
        ConfigError: A value is out of range.

    >>> import numpy as np
    >>> theta, outer = np.float32([1.0, 2.0]), SGD(lr=0.5)
    >>> outer.update(theta, np.float32([2.0, 0.0]), outer.init(theta))
    >>> theta.tolist()
    [0.0, 2.0]
    """

    lr: float = 1.0
    at: At = "worker"

    def __post_init__(self) -> None:
        check_rate(self.lr, self.at)

    def init(self, theta: Array) -> State:
        return {}

    def update(self, theta: Array, gradient: Array, state: State) -> None:
        theta -= gradient * self.lr
