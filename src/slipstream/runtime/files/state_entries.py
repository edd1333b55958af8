"""The names of entries of an optimizer's state, in messages and in checkpoints."""

from __future__ import annotations

WEIGHTS, AVERAGE = "weights", "averaged weights"  # their names as entries of a state
SCALAR_STATE = frozenset({"step", "mu_product", "eta", "mu"})


def is_scalar(name: str) -> bool:
    """Return whether a state entry is one number per tensor, not per element."""
    return name in SCALAR_STATE
