"""Asynchronous SGD (Downpour, DistBelief): every gradient is applied when it arrives.

- Topology: sharded servers, chunks dealt evenly.
- Consistency: none. A worker goes on with the weights as they are when its gradient has been
  applied; meanwhile others' have been, so that gradients are stale. How stale is in ``job.stats``.
- What travels: dense gradients up, new weights down: the user's optimizer runs at the shards.
- When: as each layer's backward ends; or after it, where the whole gradient is clipped first.

With n workers n gradients are applied where rounds apply one mean: what is stable in rounds may
explode here. Divide the learning rate by n and keep momentum near 0.
"""

from __future__ import annotations

from slipstream.consistency import ByAge, Consistency, Constant, Each, Lag
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.strategy import Strategy
from slipstream.systems.push_pull import applied_at, order_of_leaving
from slipstream.systems.wires import Wire, routes_for
from slipstream.topologies import Sharded


def async_sgd(
    *,
    clip_norm: float | None = None,
    lr_by_staleness: bool = False,
    ramp_up: int = 0,
    averaged: float | None = None,
    overlap: bool = True,
    wire: Wire = "own",
    chunk_bytes: int = CHUNK_BYTES,
) -> Strategy:
    """Nobody waits for anybody.

    Args:
        clip_norm: Each worker's whole gradient is scaled down to this norm before it leaves.
        lr_by_staleness: Whether the learning rate is divided by a gradient's age in updates.
        ramp_up: Worker k of n joins after k/n of so many updates, so that staleness grows slowly.
        averaged: The decay of averaged weights, such as 0.9999 (see ``job.averaged_weights``); None
            keeps none.
        overlap: Whether a layer's gradient leaves when its backward ends; else after all layers'.
        wire: The form of gradients on the wire: see ``routes_for``; "own" is exact.
        chunk_bytes: The most of a tensor that is sent as one message.

    Returns:
        The strategy.

    Raises:
        ConfigError: A value makes no sense.

    >>> async_sgd(lr_by_staleness=True).consistency.damping
    ByAge()
    """
    return Strategy(
        "async_sgd",
        routes_for(wire, Sharded()),
        Consistency(Each(ramp_up), Lag(0), ByAge() if lr_by_staleness else Constant()),
        applied_at("holder", averaged, clip_norm),
        order_of_leaving(overlap and clip_norm is None, "server"),
        chunk_bytes,
    )
