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

from slipstream.codecs import Dense
from slipstream.codecs.dense import Wire
from slipstream.consistency import BoundedStaleness
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.strategy import Route, Strategy, everywhere
from slipstream.systems.push_pull import order_of_leaving
from slipstream.topologies import Sharded


def bounded_staleness(
    s: int = 1,
    *,
    averaged: float | None = None,
    overlap: bool = True,
    wire: Wire = "own",
    chunk_bytes: int = CHUNK_BYTES,
) -> Strategy:
    """Dense push-pull in which nobody computes with weights older than ``s`` clocks."""
    road = Route(Sharded(), push=Dense(wire), publish=Dense())
    return Strategy(
        "bounded_staleness",
        route=everywhere(road),
        consistency=BoundedStaleness(s),
        schedule=order_of_leaving(overlap, "server"),
        update="server",
        chunk_bytes=chunk_bytes,
        averaged=averaged,
    )
