"""Reading learning curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Curve = Sequence[Sequence[float]]  # of seconds and a metric


def time_to(curve: Curve, target: float) -> float | None:
    """Return when the mean of three evaluations reached the target and then stayed there."""
    for at in range(len(curve) - 2):
        three = [metric for _, metric in curve[at : at + 3]]
        if three[0] >= target and statistics.mean(three) >= target:
            return curve[at][0]
    return None
