"""Stale-synchronous parallel (Ho and others, 2013): workers run ahead by at most s clocks.

- Topology: sharded servers, chunks dealt evenly.
- Consistency: a worker begins clock c only with weights that contain the gradients of all workers
  up to clock c − s − 1. Update t is applied when all workers have pushed clock t; later gradients
  that faster workers have already pushed are part of it. With s = 0 this is synchronous.
- What is sent: dense gradients up, new weights down: the user's optimizer runs at the shards.
- When: as each layer's backward ends.

Workers do not wait for one that is slow now and then; one that is always slow slows down all
workers. The learning rate has to decrease as s grows: rates that are stable with s = 0 may diverge.

References:
    Ho and others: More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server
    (2013).
"""

from __future__ import annotations

from slipstream.consistency import Consistency, Lag, StaleSynchronous
from slipstream.methods import Rounds
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.strategy import Strategy
from slipstream.systems.push_pull import applied_at, schedule_for
from slipstream.systems.wires import Wire, routes_for
from slipstream.topologies import Sharded


def bounded_staleness(
    s: int = 1,
    *,
    averaged: float | None = None,
    overlap: bool = True,
    wire: Wire = "same",
    chunk_bytes: int = CHUNK_BYTES,
) -> Strategy:
    """Push and pull dense gradients; no worker computes with weights older than ``s`` clocks.

    Args:
        s: The staleness bound; 0 is synchronous.
        averaged: The decay of averaged weights, such as 0.9999 (see ``job.averaged_weights``); None
            keeps none.
        overlap: Send a layer's gradient when its backward ends; False: after the backward pass.
        wire: The form of gradients on the wire: see ``routes_for``; "same" is exact.
        chunk_bytes: The largest part of a tensor that is sent as one message.

    Raises:
        ConfigError: A value is invalid.

    >>> bounded_staleness(2).rounds.consistency.gate
    Lag(steps=2)
    """
    return Strategy(
        "bounded_staleness",
        Rounds(
            routes_for(wire, Sharded()),
            Consistency(StaleSynchronous(), Lag(s)),
            applied_at("server", averaged),
            schedule_for(overlap, "server"),
            chunk_bytes,
        ),
    )
