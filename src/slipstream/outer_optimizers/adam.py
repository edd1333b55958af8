"""Adam over outer rounds (Reddi and others, 2021: FedAdam)."""

from __future__ import annotations

import math

from slipstream.errors import ConfigError
from slipstream.outer_optimizers.outer_optimizer import (
    STEP,
    Array,
    OuterOptimizer,
    State,
    check_rate,
    check_share,
    zeros_like,
)
from slipstream.outer_optimizers.place import At

MEAN, MEAN_SQUARE = "exp_avg", "exp_avg_sq"  # as torch's Adam calls them


class Adam(OuterOptimizer, frozen=True):
    """Move every weight by the mean outer gradient relative to its usual size.

        m ← β₁ m + (1 − β₁) Δ;  v ← β₂ v + (1 − β₂) Δ²
        θ ← θ − η m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε)

    Args:
        lr: η, above 0.
        beta1: β₁, at least 0 and below 1.
        beta2: β₂, at least 0 and below 1.
        eps: ε, above 0.
        at: "worker": every worker updates. "server": the servers update, and send back θ.

    Raises:
        ConfigError: A value is out of range.

    >>> import numpy as np
    >>> theta, outer = np.float64([1.0, 2.0]), Adam(lr=0.5, eps=1e-12)
    >>> outer.update(theta, np.float64([4.0, -0.1]), outer.init(theta))
    >>> theta.round(9).tolist()  # the first step is as long as the learning rate
    [0.5, 2.5]

    References:
        Reddi and others: Adaptive Federated Optimization (2021).
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    at: At = "worker"

    def __post_init__(self) -> None:
        check_rate(self.lr, self.at)
        check_share("beta1", self.beta1)
        check_share("beta2", self.beta2)
        if not isinstance(self.eps, int | float) or not 0 < self.eps < math.inf:
            raise ConfigError(f"eps={self.eps!r}: give a number above 0")

    def init(self, theta: Array) -> State:
        return {STEP: 0.0, MEAN: zeros_like(theta), MEAN_SQUARE: zeros_like(theta)}

    def update(self, theta: Array, gradient: Array, state: State) -> None:
        state[STEP] = t = state[STEP] + 1.0
        m, v = state[MEAN], state[MEAN_SQUARE]
        m *= self.beta1
        m += gradient * (1.0 - self.beta1)
        v *= self.beta2
        v += gradient * gradient * (1.0 - self.beta2)
        root = (v * (1.0 / (1.0 - self.beta2**t))) ** 0.5
        root += self.eps
        theta -= m / root * (self.lr / (1.0 - self.beta1**t))
