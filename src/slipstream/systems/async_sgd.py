"""Asynchronous SGD (Downpour, DistBelief): every gradient is applied when it arrives.

- Topology: sharded servers, chunks dealt evenly.
- Consistency: none. A worker continues with the weights that its gradient was applied to. Meanwhile
  gradients of other workers are applied, so gradients are stale; ``job.stats`` reports how stale.
- What is sent: dense gradients up, new weights down: the user's optimizer runs at the shards.
- When: as each layer's backward ends; or after it, where the whole gradient is clipped first.

n workers apply n gradients in the time of one synchronous round: settings that are stable there may
diverge here. Divide the learning rate by n and keep momentum near 0.

References:
    Dean and others: Large Scale Distributed Deep Networks (2012).
"""

from __future__ import annotations

from slipstream.consistency import Asynchronous, ByAge, Consistency, Constant, Lag
from slipstream.methods import Rounds
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.strategy import Strategy
from slipstream.systems.push_pull import applied_at, schedule_for
from slipstream.systems.wires import Wire, routes_for
from slipstream.topologies import Sharded


def async_sgd(
    *,
    clip_norm: float | None = None,
    lr_by_staleness: bool = False,
    ramp_up: int = 0,
    averaged: float | None = None,
    overlap: bool = True,
    wire: Wire = "same",
    chunk_bytes: int = CHUNK_BYTES,
) -> Strategy:
    """Apply every gradient when it arrives; no worker waits for another.

    Args:
        clip_norm: Scale each worker's whole gradient down to this norm before it is sent.
        lr_by_staleness: Divide the learning rate by a gradient's age in updates.
        ramp_up: Worker k of n joins after k/n of so many updates, so that staleness grows slowly.
        averaged: The decay of averaged weights, such as 0.9999 (see ``job.averaged_weights``); None
            keeps none.
        overlap: Send a layer's gradient when its backward ends; False: after the backward pass.
        wire: The form of gradients on the wire: see ``routes_for``; "same" is exact.
        chunk_bytes: The largest part of a tensor that is sent as one message.

    Raises:
        ConfigError: A value is invalid.

    >>> async_sgd(lr_by_staleness=True).rounds.consistency.damping
    ByAge()
    """
    return Strategy(
        "async_sgd",
        Rounds(
            routes_for(wire, Sharded()),
            Consistency(Asynchronous(ramp_up), Lag(0), ByAge() if lr_by_staleness else Constant()),
            applied_at("server", averaged, clip_norm),
            schedule_for(overlap and clip_norm is None, "server"),
            chunk_bytes,
        ),
    )
