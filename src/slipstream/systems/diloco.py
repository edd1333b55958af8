"""DiLoCo (Douillard and others, 2023; streaming form 2025): many local steps for one exchange.

- Topology: every worker holds every tensor, its rounds done by collectives; few bits a value, or
  rounds of the first N, take sharded servers.
- Consistency: outer rounds of all n workers; with ``first=N`` of the first N.
- What travels: worker i's outer gradient, the distance it has moved in H steps of the user's
  optimizer.
- When: after every H-th step; in F fragments, one every H / F steps, merged τ steps later.

    Δᵢ = θ − θᵢ;   v ← μ v + mean Δᵢ;   θ ← θ − η (mean Δᵢ + μ v);   θᵢ ← α θᵢ + (1 − α) θ

The inner optimizer's state stays with its worker. We deviate: what a codec has not sent yet waits
in a residual, which is taken out of θᵢ when it merges, so that no part of a step counts twice; with
``first=N`` what a late worker sent returns to its residual, and counts in its next round.
"""

from __future__ import annotations

import msgspec

from slipstream.codecs import Above, Dense, Filter
from slipstream.consistency import All, Consistency, FirstOf
from slipstream.routes import (
    AnyPolicy,
    ByRole,
    ByTensor,
    Collective,
    Everywhere,
    Large,
    Route,
    Rule,
)
from slipstream.schedules import AfterBackward
from slipstream.strategy import Strategy
from slipstream.systems.allreduce import BUCKET_BYTES
from slipstream.systems.wires import Wire, routes_for
from slipstream.topologies import Mesh, Sharded
from slipstream.updates import LocalSteps, Nesterov, Update

# Every entry is sent, and what a round has dropped returns to the residual.
EVERYTHING = Filter(Above(0.0, decay="constant"))


def diloco(
    *,
    every: int = 50,
    lr: float = 0.7,
    momentum: float = 0.9,
    fragments: int = 1,
    overlap_steps: int = 0,
    mix: float | None = None,
    wire: Wire = "own",
    first: int | None = None,
) -> Strategy:
    """Local steps, and an outer optimizer with Nesterov momentum.

    Args:
        every: H, the number of local steps between two rounds of a tensor.
        lr: η, the outer learning rate.
        momentum: μ, the outer momentum.
        fragments: F, into how many parts the model is cut, each with rounds of its own.
        overlap_steps: τ, how many steps a worker makes while its outer gradient is under way.
        mix: α, how much of its own weights a worker keeps when it merges; by default 0.5 where
            steps overlap, and else 0.
        wire: The form of outer gradients on the wire: see ``routes_for``; "own" is exact.
        first: N; a round closes with the first N outer gradients. The outer optimizer then runs at
            the servers.

    Returns:
        The strategy.

    Raises:
        ConfigError: A value makes no sense.

    >>> diloco(every=100, fragments=4, overlap_steps=5).update.inner.mix
    0.5
    """
    kept = (0.5 if overlap_steps else 0.0) if mix is None else mix
    return Strategy(
        "diloco",
        outer_routes(wire, first, exact_results=kept > 0),
        Consistency(All() if first is None else FirstOf(first)),
        Update(
            LocalSteps(every, fragments, overlap_steps, kept),
            Nesterov(lr, momentum, at="worker" if first is None else "holder"),
        ),
        AfterBackward(),
        chunk_bytes=BUCKET_BYTES,
    )


def local_sgd(*, every: int = 8, wire: Wire = "own", first: int | None = None) -> Strategy:
    """Local steps, after which all workers go on from the mean of their weights.

    Args:
        every: H, the number of local steps between two means.
        wire: The form of outer gradients on the wire: see ``routes_for``; "own" is exact.
        first: N; a mean is taken of the first N workers.

    Returns:
        The strategy.

    Raises:
        ConfigError: A value makes no sense.

    >>> local_sgd(every=4).update.outer
    Nesterov(lr=1.0, momentum=0.0, at='worker')
    """
    strategy = diloco(every=every, lr=1.0, momentum=0.0, wire=wire, first=first)
    return msgspec.structs.replace(strategy, name="local_sgd")


def outer_routes(wire: Wire, first: int | None, *, exact_results: bool) -> AnyPolicy:
    """Collectives where values are plain and all workers take part; else servers."""
    if first is not None:
        if wire == "own":
            route = Route(Sharded(), up=EVERYTHING)
            return ByTensor((Rule(Large(0), route),), default=Route(Sharded()))
        return routes_for(wire, Sharded())
    if wire == "int8" or wire == "int4":
        return routes_for(wire, Sharded(), back="dense" if exact_results else "same")
    dense = Dense(wire)
    reduced = Route(Mesh(), up=dense, down=dense, over=Collective())
    return ByRole(parameter=Everywhere(reduced), buffer=Everywhere(Route(Mesh())))
