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

from slipstream.codecs import Dense
from slipstream.codecs.dense import Wire
from slipstream.consistency import Asynchronous
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.strategy import Route, Strategy, everywhere
from slipstream.systems.push_pull import order_of_leaving
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
    """Nobody waits for anybody. ``clip_norm`` cuts each worker's whole gradient to that norm;
    ``lr_by_staleness`` divides the learning rate by a gradient's age in updates; with ``ramp_up``
    worker k of n joins after k/n of so many updates, so that staleness grows slowly."""
    road = Route(Sharded(), push=Dense(wire), publish=Dense())
    return Strategy(
        "async_sgd",
        route=everywhere(road),
        consistency=Asynchronous(lr_by_staleness, ramp_up),
        schedule=order_of_leaving(overlap and clip_norm is None, "server"),
        update="server",
        chunk_bytes=chunk_bytes,
        averaged=averaged,
        clip_norm=clip_norm,
    )
