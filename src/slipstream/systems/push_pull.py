"""The parameter server: push gradients to sharded servers, pull the result.

- Topology: sharded servers, chunks dealt evenly; workers of one host aggregate first.
- Consistency: rounds of all n workers.
- What is sent: dense gradients up; down the mean gradient (``update="worker"``: the user's
  optimizer runs at every worker) or new weights (``update="server"``: it runs at the shards).
- When: ``overlap=False`` after the whole backward pass, the plain server of the papers;
  ``overlap=True`` as each layer's backward ends (wait-free backpropagation).

    ḡᵗ = (g₀ᵗ + g₁ᵗ + … + gₙ₋₁ᵗ) / n, summed in rank order, so that runs agree bit for bit.

Deviations: Poseidon (ATC 2017) waits for all layers at the end of the step. With
``update="server"`` we wait for each layer just before its next forward, and send the layer that
is needed first before the others.

References:
    Li and others: Scaling Distributed Machine Learning with the Parameter Server (2014).
"""

from __future__ import annotations

from typing import Literal

from slipstream.errors import UnknownStrategy
from slipstream.methods import Rounds
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.schedules import AfterBackward, AnySchedule, Priority, WaitFree
from slipstream.strategy import Strategy
from slipstream.systems.wires import Wire, routes_for, with_levels
from slipstream.topologies import Sharded
from slipstream.updates import At, ClipNorm, Ema, Update, UserOptimizer

UpdateAt = Literal["worker", "server"]


def push_pull(
    *,
    overlap: bool = True,
    update: UpdateAt = "worker",
    wire: Wire = "same",
    averaged: float | None = None,
    clip_norm: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    hierarchical: bool = True,
) -> Strategy:
    """Push gradients to sharded servers and pull the result, with or without overlap.

    Args:
        overlap: Send a layer's gradient when its backward ends; False: after the backward pass.
        update: The place of the user's optimizer: every "worker", or the "server".
        wire: The form of gradients on the wire: see ``routes_for``; "same" is exact.
        averaged: The decay of averaged weights, such as 0.9999 (see ``job.averaged_weights``); None
            keeps none.
        clip_norm: Scale each worker's whole gradient down to this norm before it is sent, after
            backward.
        chunk_bytes: The largest part of a tensor that is sent as one message.
        hierarchical: If several workers share a host, and there are several hosts, the workers of a
            host aggregate first, and one stream per host crosses the network.

    Raises:
        ConfigError: A value is invalid.

    >>> push_pull(update="server").rounds.schedule
    Priority()
    """
    if update not in ("worker", "server"):
        raise UnknownStrategy(f"push_pull(update={update!r}): choose 'worker' or 'server'")
    return Strategy(
        "push_pull",
        # New weights are not rounded on the way back: the errors would accumulate over steps.
        Rounds(
            routes_for(
                wire,
                with_levels(hierarchical, Sharded()),
                back="same" if update == "worker" else "dense",
            ),
            update=applied_at("worker" if update == "worker" else "server", averaged, clip_norm),
            schedule=schedule_for(overlap and clip_norm is None, update),
            chunk_bytes=chunk_bytes,
        ),
    )


def schedule_for(overlap: bool, update: UpdateAt) -> AnySchedule:
    if not overlap:
        return AfterBackward()
    # Where workers update, the step waits for every layer, so priorities would gain nothing.
    return Priority() if update == "server" else WaitFree()


def applied_at(at: At, averaged: float | None = None, clip_norm: float | None = None) -> Update:
    """Run the user's optimizer at workers, or at the holders of tensors."""
    return Update(
        outer=UserOptimizer(at),
        before=() if clip_norm is None else (ClipNorm(clip_norm),),
        average=None if averaged is None else Ema(averaged),
    )
