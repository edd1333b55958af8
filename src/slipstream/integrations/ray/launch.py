"""``run``: checks its arguments, then calls a function on actors of Ray."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import ray

from slipstream.errors import ConfigError
from slipstream.integrations.ray.actors import ActorJob, placed
from slipstream.integrations.ray.workers import checked, settings_of
from slipstream.methods import PartialExchange
from slipstream.strategy import Strategy

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


def run(
    fn: Callable[[], Any],
    *,
    workers: int,
    strategy: Strategy | str | None = None,
    resources: Mapping[str, float] | None = None,
    placement: str = "PACK",
    restarts: int | None = None,
    place_limit_s: float = 60.0,
) -> list[Any]:
    """Train on Ray: call ``fn`` once on each of ``workers`` actors, and wait for all.

    ``fn`` takes no argument and has the two lines: ``slipstream.init`` and ``job.distribute``. A
    job without a ``with`` block ends when ``fn`` returns. All actors are ended when ``run`` returns
    or raises, also after Ctrl-C.

    Args:
        workers: The number of workers.
        strategy: The strategy; by default the one that ``fn`` names, else ``push_pull``.
        resources: The resources of each worker; by default ``{"CPU": 1}``.
        placement: Ray's strategy for the placement group: PACK, SPREAD, STRICT_PACK or
            STRICT_SPREAD.
        restarts: The number of restarts of workers that died, in all. Only with ``ako``, where
            workers rejoin the training; if ``strategy`` is ``ako``, ``workers`` by default, else 0.
        place_limit_s: The longest wait until the cluster has the resources.

    Returns:
        The results of ``fn``, by rank; None of a worker that was started again too late to rejoin.

    Raises:
        ConfigError: An argument is invalid, and nothing was started.
        LaunchError: The cluster has no place for the workers, or cannot start them.
        PeerFailed: A worker's process or node died.
        Exception: The first error that a worker raised.
    """
    bundle = _checked_arguments(fn, workers, resources, placement, place_limit_s)
    chosen = checked(strategy, several=workers > 1)
    num_restarts = _checked_restarts(restarts, workers, chosen)
    if not ray.is_initialized():
        ray.init()
    sent = _sent(fn)
    with placed(workers, bundle, placement, place_limit_s) as group:
        job = ActorJob(group, bundle, sent, settings_of(chosen), num_restarts)
        try:
            job.start(workers)
            return job.results()
        finally:
            job.end()


def _checked_arguments(
    fn: object,
    workers: object,
    resources: Mapping[str, float] | None,
    placement: str,
    place_limit_s: object,
) -> dict[str, float]:
    """Check the arguments and return the bundle of one worker; raise ConfigError."""
    if not callable(fn) or not takes_no_argument(fn):
        raise ConfigError(
            f"run takes a function without arguments; it was given {fn!r}: give it those with "
            "functools.partial"
        )
    if type(workers) is not int or workers < 1:
        raise ConfigError(f"workers={workers!r}: give a whole number, 1 or more")
    if placement not in PLACEMENTS:
        raise ConfigError(f"placement={placement!r}: choose one of {', '.join(PLACEMENTS)}")
    if not isinstance(place_limit_s, int | float) or not 0 < place_limit_s < math.inf:
        raise ConfigError(f"place_limit_s={place_limit_s!r}: give seconds, more than 0")
    if not isinstance(resources, Mapping | None):
        raise ConfigError(f"resources={resources!r}: give a mapping, such as {{'CPU': 1}}")
    bundle = {"CPU": 1.0} if resources is None else dict(resources)
    for name, amount in bundle.items():
        if not isinstance(amount, int | float) or not 0 < amount < math.inf:
            raise ConfigError(f"resources: {name}={amount!r} of each worker has to be above 0")
    if not bundle:
        raise ConfigError("resources are empty: give at least one, such as {'CPU': 1}")
    return bundle


def takes_no_argument(fn: Callable[..., Any]) -> bool:
    """Return whether a call needs no argument."""
    try:
        signature(fn, follow_wrapped=False).bind()
    except TypeError:
        return False
    except ValueError:  # a function of C, whose signature Python may not know
        pass
    return True


def _checked_restarts(restarts: int | None, workers: int, strategy: Strategy | None) -> int:
    """Return the number of restarts; raise ConfigError for an invalid one."""
    rejoins = strategy is not None and isinstance(strategy.method, PartialExchange)
    if restarts is None:
        return workers if rejoins else 0
    if type(restarts) is not int or restarts < 0:
        raise ConfigError(f"restarts={restarts!r}: give a whole number, 0 or more")
    if restarts and strategy is not None and not rejoins:
        raise ConfigError(
            f"restarts={restarts}: a worker of {strategy.name} cannot rejoin a job that continues; "
            "use ako, or resume from job.save with Ray Train's FailureConfig"
        )
    return restarts


def _sent(fn: Callable[[], Any]) -> Any:
    """Put the function into Ray's object store; raise ConfigError if it cannot be sent."""
    try:
        return ray.put(fn)
    except TypeError as error:
        raise ConfigError(f"{fn!r} cannot be sent to workers: {error}") from error
