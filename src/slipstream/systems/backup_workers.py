"""Synchronous SGD with backup workers (Chen and others, 2016): the first N of N + b make a round.

- Topology: sharded servers, chunks dealt evenly.
- Consistency: round t is the mean of the first N gradients of round t that are in, the same N at
  every shard. The others' are dropped and counted; who is late goes on with the round that is open,
  on its weights. No gradient is ever stale.
- What travels: dense gradients up, new weights down: the user's optimizer runs at the shards.
- When: as each layer's backward ends; weights are awaited just before the layer's next forward.

    ḡᵗ = (1/N) Σ over the first N of gᵢᵗ,   θᵗ⁺¹ = F(θᵗ, ḡᵗ),   θ̄ ← α θ̄ + (1 − α) θᵗ⁺¹

The paper leaves open whether servers agree on the N; shards that miss different workers learn badly
from data that is not dealt at random, so here they do.
"""

from __future__ import annotations

from typing import Literal

from slipstream.codecs import Dense
from slipstream.codecs.dense import Wire
from slipstream.consistency import Rounds
from slipstream.errors import UnknownStrategy
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.strategy import Route, Strategy, everywhere
from slipstream.systems.push_pull import order_of_leaving
from slipstream.topologies import Sharded


def backup_workers(
    first: int | Literal["auto"] | None = None,
    *,
    backup: int | None = None,
    close_after_s: float | None = None,
    min_first: int = 1,
    averaged: float | None = None,
    overlap: bool = True,
    wire: Wire = "own",
    chunk_bytes: int = CHUNK_BYTES,
) -> Strategy:
    """Rounds of the ``first`` N workers, or of all but ``backup``; with neither, or "auto", N is
    found in the run.

    ``close_after_s`` closes a round after that time with whoever has come, at least ``min_first``;
    by itself it waits for all until then.
    ``averaged`` (such as 0.9999) also keeps averaged weights: see ``job.averaged_weights``.
    """
    if isinstance(first, str) and first != "auto":
        raise UnknownStrategy(f"backup_workers(first={first!r}): give a number, or 'auto'")
    road = Route(Sharded(), push=Dense(wire), publish=Dense())
    return Strategy(
        "backup_workers",
        route=everywhere(road),
        consistency=Rounds(
            first=None if isinstance(first, str) else first,
            backup=0 if first is None and close_after_s and backup is None else backup,
            adapts=first == "auto" or (first is None and backup is None and not close_after_s),
            close_after_s=close_after_s,
            min_first=min_first,
        ),
        schedule=order_of_leaving(overlap, "server"),
        update="server",
        chunk_bytes=chunk_bytes,
        averaged=averaged,
    )
