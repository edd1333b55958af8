"""Learning rates for many workers, by the rules of the paper on synchronous SGD (A.3). Pure.

"Revisiting Distributed Synchronous SGD", Chen et al., 2016. Its symbols: N gradients per step, γ₀
the initial rate, β its decay, t the step, T = |X|/B the number of one worker's batches per epoch.
"""

from __future__ import annotations

import math

from slipstream.errors import ConfigError


def synchronous_rate(base: float, workers: int) -> float:
    """Return γ₀ = base · N, the rate for the mean of ``workers`` gradients.

    With backup workers, count the gradients of a round, not the workers that run.

    Args:
        base: The rate for one worker's batch.
        workers: N.

    Raises:
        ConfigError: An argument is not above 0.

    >>> synchronous_rate(0.045, workers=100)
    4.5
    """
    _check_rate("base", base)
    _check_workers(workers)
    return base * workers


def asynchronous_rate(base: float, workers: int) -> float:
    """Return base / n, the rate for ``workers`` workers that never wait for each other.

    A gradient is then about n − 1 updates old, and stability depends on the product of rate and
    age. (The paper's own rate for asynchronous training, 0.045, was found with all workers running
    and needs no division.) Also keep momentum near 0: it makes every gradient count again later.

    Args:
        base: The rate for one worker alone.
        workers: n.

    Raises:
        ConfigError: An argument is not above 0.

    >>> asynchronous_rate(0.1, workers=4)
    0.025
    """
    _check_rate("base", base)
    _check_workers(workers)
    return base / workers


def stale_rate(staleness: int) -> float:
    """Return sin(π / (4s + 2)), the factor for a learning rate when updates are s steps late.

    The highest stable rate of gradient descent on a quadratic shrinks by this factor: to a half
    with s = 1, to 0.31 with s = 2, to about 0.8/s for larger s.

    Args:
        staleness: s.

    Raises:
        ConfigError: It is not a whole number of 0 or more.

    >>> [round(stale_rate(s), 2) for s in (0, 1, 2)]
    [1.0, 0.5, 0.31]
    """
    if type(staleness) is not int or staleness < 0:
        raise ConfigError(f"a staleness of {staleness!r}: give a number of steps, 0 or more")
    return math.sin(math.pi / (4 * staleness + 2))


def decayed_rate(
    initial: float, *, step: int, batches_per_epoch: float, workers: int = 1, decay: float = 0.94
) -> float:
    """Return γ₀ β^(tN/(2T)): multiplied by ``decay`` after every two passes over the data.

    Args:
        initial: γ₀.
        step: t, which counts updates from 0.
        batches_per_epoch: T: examples in the data set over examples in one worker's batch.
        workers: How many gradients an update averages, so that rates agree after the same number of
            examples: N when synchronous, 1 when asynchronous.
        decay: β.

    Raises:
        ConfigError: A value is invalid.

    >>> round(decayed_rate(1.0, step=200, batches_per_epoch=100), 2)
    0.94

    As a schedule, relative to the initial rate of the optimizer::

        optimizer = torch.optim.SGD(model.parameters(), lr=synchronous_rate(0.045, N))
        LambdaLR(
            optimizer,
            lambda step: decayed_rate(1.0, step=step, batches_per_epoch=T, workers=N),
        )
    """
    _check_rate("initial", initial)
    _check_workers(workers)
    if step < 0:
        raise ConfigError(f"step={step!r}: count updates from 0")
    if not 0 < batches_per_epoch < math.inf:
        raise ConfigError(
            f"batches_per_epoch={batches_per_epoch!r}: give the examples in the data set over "
            "those in one worker's batch"
        )
    if not 0 < decay <= 1:
        raise ConfigError(
            f"decay={decay!r}: give a factor above 0 and at most 1 (the paper's: 0.94)"
        )
    return float(initial * decay ** (step * workers / (2 * batches_per_epoch)))


def _check_rate(name: str, rate: float) -> None:
    if not 0 < rate < math.inf:
        raise ConfigError(f"{name}={rate!r}: a learning rate is a number above 0")


def _check_workers(workers: int) -> None:
    if workers < 1:
        raise ConfigError(f"workers={workers!r}: give 1 or more")
