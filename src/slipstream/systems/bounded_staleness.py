"""Stale-synchronous parallel (Ho and others, 2013): workers run ahead by at most s clocks.

- Topology: sharded servers, chunks dealt evenly.
- Consistency: who begins clock c has weights with everybody's gradients up to clock c − s − 1 in
  them. Update t is applied when all workers have pushed clock t; what faster ones have pushed since
  is part of it. With s = 0 these are rounds.
- What travels: dense gradients up, new weights down: the user's optimizer runs at the shards.
- When: as each layer's backward ends.

A worker that is slow now and then is not waited for; one that always is slows all to its pace. What
is stable in rounds may not be here: the learning rate has to come down as s goes up.
"""

from __future__ import annotations

from slipstream.consistency import Consistency, Fold, Lag
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.strategy import Strategy
from slipstream.systems.push_pull import applied_at, order_of_leaving
from slipstream.systems.wires import Wire, routes_for
from slipstream.topologies import Sharded


def bounded_staleness(
    s: int = 1,
    *,
    averaged: float | None = None,
    overlap: bool = True,
    wire: Wire = "own",
    chunk_bytes: int = CHUNK_BYTES,
) -> Strategy:
    """Dense push-pull in which no worker computes with weights older than ``s`` clocks.

    Args:
        s: The staleness bound; 0 makes rounds.
        averaged: The decay of averaged weights, such as 0.9999 (see ``job.averaged_weights``); None
            keeps none.
        overlap: Whether a layer's gradient leaves when its backward ends; else after all layers'.
        wire: The form of gradients on the wire: see ``routes_for``; "own" is exact.
        chunk_bytes: The most of a tensor that is sent as one message.

    Returns:
        The strategy.

    Raises:
        ConfigError: A value makes no sense.

    >>> bounded_staleness(2).consistency.gate
    Lag(steps=2)
    """
    return Strategy(
        "bounded_staleness",
        routes_for(wire, Sharded()),
        Consistency(Fold(), Lag(s)),
        applied_at("holder", averaged),
        order_of_leaving(overlap, "server"),
        chunk_bytes,
    )
