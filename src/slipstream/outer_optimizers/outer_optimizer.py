"""The interface of outer optimizers: a frozen recipe, and a state that its user keeps."""

from __future__ import annotations

import math
from typing import Any, Literal

from slipstream.errors import ConfigError
from slipstream.outer_optimizers.place import At, check_place, facts_of
from slipstream.parts import Facts, Part, facts

# A numpy array or a torch tensor. Both have the operators + - * / ** and their forms in place.
Array = Any
# Arrays like the weights, by name; under "step" the number of updates so far.
State = dict[str, Any]
STEP = "step"


class OuterOptimizer(Part, frozen=True):
    """A recipe that applies the mean outer gradient Δ to the outer weights θ, tensor by tensor.

    Subclasses use only operators that numpy arrays and torch tensors share, so that servers run
    them without torch. Every operator rounds, so all processors get the same bits. torch's own
    optimizers round some products and sums only once, so their last bit may differ.

    A tensor may be cut, and its pieces updated by different servers; so ``update`` treats every
    element in the same way. Checkpoints keep the state by its names.
    """

    @property
    def at(self) -> At:
        """The place of updates: every worker, or the holders, which send back θ."""
        raise NotImplementedError

    def init(self, theta: Array) -> State:
        """Return the state before the first update of these weights."""
        raise NotImplementedError

    def update(self, theta: Array, gradient: Array, state: State) -> None:
        """Change the weights and the state in place.

        Args:
            theta: θ, in 32 or 64 bits, with one dimension or more.
            gradient: Δ, in the same format; not changed.
            state: What ``init`` returned; this call may also replace its entries.
        """
        raise NotImplementedError

    def facts(self) -> Facts:
        return facts_of(self.at) | facts("an outer optimizer applies the result")


def zeros_like(theta: Array) -> Array:
    """Return as many zeros, in the same format."""
    return theta**0 - 1.0  # also zero where a weight is NaN or infinite


def check_rate(lr: object, at: object) -> None:
    """Check the arguments that all outer optimizers have.

    Raises:
        ConfigError: The learning rate is not above 0, or the place is unknown.
    """
    check_place(at)
    if not isinstance(lr, int | float) or not 0 < lr < math.inf:
        raise ConfigError(f"lr={lr!r}: give an outer learning rate above 0")


def check_share(name: Literal["momentum", "beta1", "beta2"], value: object) -> None:
    """Check the share that a moving average keeps of its old value.

    Raises:
        ConfigError: It is not at least 0 and below 1.
    """
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"{name}={value!r}: choose at least 0 and below 1")
