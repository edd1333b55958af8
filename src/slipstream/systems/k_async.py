"""K-async SGD (Dutta, Joshi, Ghosh, Dube and Nagpurkar, 2018): K gradients of any age an update.

- Topology: sharded servers, chunks dealt evenly.
- Consistency: the first K gradients to arrive make an update, the same K at every shard. Their
    workers continue with the new weights. The other workers continue their steps, and their
    gradients count in a later update. No gradient is dropped; one that took long is stale, and
    ``job.stats`` reports how stale. K = 1 is ``async_sgd``; with K of all workers no gradient is
    stale.
- What is sent: dense gradients up, new weights down: the user's optimizer runs at the shards.
- When: as each layer's backward ends; or after it, where the whole gradient is clipped first.

    wʲ⁺¹ = wʲ − (η/K) Σ over the first K of g(w^τ(l,j), ξ(l,j)),   τ(l,j) ≤ j

τ(l,j) counts the updates in the weights that worker l used. Deviations: the paper has one server;
here server 0 decides for all shards. The paper also studies an η that falls with staleness; here an
update takes η and other settings from the worker with the newest of its gradients.

References:
    Dutta, Joshi, Ghosh, Dube and Nagpurkar:
    Slow and Stale Gradients Can Win the Race: Error-Runtime Trade-offs in Distributed SGD.
    AISTATS 2018, https://arxiv.org/abs/1803.01113
"""

from __future__ import annotations

from slipstream.consistency import Consistency, KAsync
from slipstream.methods import Rounds
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.strategy import Strategy
from slipstream.systems.push_pull import applied_at, schedule_for
from slipstream.systems.wires import Wire, routes_for
from slipstream.topologies import Sharded


def k_async(
    *,
    k: int = 2,
    clip_norm: float | None = None,
    averaged: float | None = None,
    overlap: bool = True,
    wire: Wire = "same",
    chunk_bytes: int = CHUNK_BYTES,
) -> Strategy:
    """Update with the first K gradients, of whatever age; none is dropped.

    Args:
        k: K, from 1 to the number of workers.
        clip_norm: Scale each worker's whole gradient down to this norm before it is sent.
        averaged: The decay of averaged weights, such as 0.9999 (see ``job.averaged_weights``); None
            keeps none.
        overlap: Send a layer's gradient when its backward ends; False: after the backward pass.
        wire: The form of gradients on the wire: see ``routes_for``; "same" is exact.
        chunk_bytes: The largest part of a tensor that is sent as one message.

    Raises:
        ConfigError: A value is invalid.

    >>> k_async(k=3).rounds.consistency.admit
    KAsync(k=3)
    """
    return Strategy(
        "k_async",
        Rounds(
            routes_for(wire, Sharded()),
            Consistency(KAsync(k)),
            applied_at("server", averaged, clip_norm),
            schedule_for(overlap and clip_norm is None, "server"),
            chunk_bytes,
        ),
    )
