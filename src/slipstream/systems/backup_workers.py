"""Synchronous SGD with backup workers (Chen and others, 2016): the first N of N + b make a round.

- Topology: sharded servers, chunks dealt evenly. With ``hierarchical=True`` workers of one host
  aggregate first, and "worker" below means "host".
- Consistency: round t is the mean of the first N gradients of round t to arrive, the same N at
  every shard. The other gradients are dropped and counted. A late worker gets the current weights
  and joins the open round. No gradient is ever stale.
- What is sent: dense gradients up, new weights down: the user's optimizer runs at the shards.
- When: as each layer's backward ends; each layer waits for weights just before its next forward.

    ḡᵗ = (1/N) Σ over the first N of gᵢᵗ,   θᵗ⁺¹ = F(θᵗ, ḡᵗ),   θ̄ ← α θ̄ + (1 − α) θᵗ⁺¹

Deviations: the paper leaves open whether servers agree on the N. Here they do: if shards dropped
different workers, training on data that is not dealt at random would suffer.

References:
    Chen, Pan, Monga, Bengio and Jozefowicz: Revisiting Distributed Synchronous SGD (2016).
"""

from __future__ import annotations

from typing import Literal

from slipstream.consistency import Consistency, FirstOf
from slipstream.errors import UnknownStrategy
from slipstream.methods import Rounds
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.strategy import Strategy
from slipstream.systems.push_pull import applied_at, schedule_for
from slipstream.systems.wires import Wire, routes_for, with_levels
from slipstream.topologies import Sharded


def backup_workers(
    first: int | Literal["auto"] | None = None,
    *,
    backup: int | None = None,
    close_after_s: float | None = None,
    min_first: int = 1,
    averaged: float | None = None,
    overlap: bool = True,
    wire: Wire = "same",
    chunk_bytes: int = CHUNK_BYTES,
    hierarchical: bool = False,
) -> Strategy:
    """Close each round with the first N gradients.

    Args:
        first: N; "auto", which is the default without ``backup``, chooses it during the run.
        backup: How many workers a round does not wait for: N is all workers but these.
        close_after_s: Also close a round after so many seconds with the gradients that have
            arrived; without ``first`` and ``backup`` it waits for all until then.
        min_first: The smallest number of gradients of such a round.
        averaged: The decay of averaged weights, such as 0.9999 (see ``job.averaged_weights``); None
            keeps none.
        overlap: Send a layer's gradient when its backward ends; False: after the backward pass.
        wire: The form of gradients on the wire: see ``routes_for``; "same" is exact.
        chunk_bytes: The largest part of a tensor that is sent as one message.
        hierarchical: If several workers share a host, and there are several hosts, the workers of a
            host aggregate first, and one stream per host crosses the network. Then ``first``,
            ``backup`` and ``min_first`` count hosts.

    Raises:
        ConfigError: A value is invalid.

    >>> backup_workers(backup=2).rounds.consistency.admit.among(workers=10).first
    8
    """
    if isinstance(first, str) and first != "auto":
        raise UnknownStrategy(f"backup_workers(first={first!r}): give a number, or 'auto'")
    admit = FirstOf(
        first=None if isinstance(first, str) else first,
        backup=0 if first is None and close_after_s and backup is None else backup,
        adapts=first == "auto" or (first is None and backup is None and not close_after_s),
        close_after_s=close_after_s,
        min_first=min_first,
    )
    return Strategy(
        "backup_workers",
        Rounds(
            routes_for(wire, with_levels(hierarchical, Sharded())),
            Consistency(admit),
            applied_at("server", averaged),
            schedule_for(overlap, "server"),
            chunk_bytes,
        ),
    )
