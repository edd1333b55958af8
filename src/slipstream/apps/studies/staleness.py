"""The staleness of gradients while training warms up. Pure."""

from __future__ import annotations

from slipstream.errors import ConfigError


def ramped_staleness(step: int, *, staleness: int, ramp_up: int) -> int:
    """Return the staleness: 0 at step 0, linear to ``staleness`` at step ``ramp_up``, rounded down.

    The paper on synchronous SGD raises staleness over the first three epochs (section 2.1), as if
    workers joined one by one; beyond about 15 steps, training that starts stale tends to diverge.

    Args:
        step: The step, counted from 0.
        staleness: The final age of gradients, in steps.
        ramp_up: The number of steps until then; 0: from the start.

    Raises:
        ConfigError: A value is below 0.

    >>> [ramped_staleness(step, staleness=4, ramp_up=100) for step in (0, 50, 100)]
    [0, 2, 4]
    """
    if step < 0:
        raise ConfigError(f"step={step!r}: count steps from 0")
    if staleness < 0:
        raise ConfigError(f"staleness={staleness!r}: give 0 (gradients are fresh) or more steps")
    if ramp_up < 0:
        raise ConfigError(f"ramp_up={ramp_up!r}: give 0 (stale from the start) or more steps")
    if step >= ramp_up:
        return staleness
    return staleness * step // ramp_up
