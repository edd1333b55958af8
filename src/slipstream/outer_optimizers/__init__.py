"""Outer optimizers: they apply mean outer gradients to the outer weights of local steps."""

from slipstream.outer_optimizers.adam import Adam
from slipstream.outer_optimizers.nesterov import Nesterov
from slipstream.outer_optimizers.outer_optimizer import OuterOptimizer, State, zeros_like
from slipstream.outer_optimizers.place import At
from slipstream.outer_optimizers.sgd import SGD

# Every outer optimizer that an update may name.
AnyOuterOptimizer = SGD | Nesterov | Adam

__all__ = [
    "SGD",
    "Adam",
    "AnyOuterOptimizer",
    "At",
    "Nesterov",
    "OuterOptimizer",
    "State",
    "zeros_like",
]
