"""Nesterov momentum over outer rounds, as in DiLoCo."""

from __future__ import annotations

from slipstream.outer_optimizers.outer_optimizer import (
    Array,
    OuterOptimizer,
    State,
    check_rate,
    check_share,
    zeros_like,
)
from slipstream.outer_optimizers.place import At

MOMENTUM = "momentum_buffer"  # as torch's SGD calls it


class Nesterov(OuterOptimizer, frozen=True):
    """Apply the mean outer gradient Δ to the outer weights θ with Nesterov momentum.

        v ← μ v + Δ;  θ ← θ − η (Δ + μ v)

    With η = 1 and μ = 0 the outer weights become the mean of the workers' weights (local SGD).

    Args:
        lr: η, above 0.
        momentum: μ, at least 0 and below 1.
        at: "worker": every worker updates. "server": the servers update, and send back θ.

    Raises:
        ConfigError: A value is out of range.

    >>> Nesterov(lr=0.7, momentum=0.9)
    Nesterov(lr=0.7, momentum=0.9, at='worker')

    References:
        Douillard and others: DiLoCo: Distributed Low-Communication Training of Language Models
        (2023).
    """

    lr: float = 0.7
    momentum: float = 0.9
    at: At = "worker"

    def __post_init__(self) -> None:
        check_rate(self.lr, self.at)
        check_share("momentum", self.momentum)

    def init(self, theta: Array) -> State:
        return {MOMENTUM: zeros_like(theta)} if self.momentum else {}

    def update(self, theta: Array, gradient: Array, state: State) -> None:
        if self.momentum:
            v = state[MOMENTUM]
            v *= self.momentum
            v += gradient
            gradient = gradient + v * self.momentum
        theta -= gradient * self.lr
