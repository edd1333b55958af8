"""The parameter server: push gradients to sharded servers, pull the result.

- Topology: sharded servers, chunks dealt evenly.
- Consistency: rounds of all n workers.
- What travels: dense gradients up; down the mean gradient (``update="worker"``: the user's
  optimizer runs at every worker) or new weights (``update="server"``: it runs at the shards).
- When: ``overlap=False`` after the whole backward pass, the vanilla server of the papers;
  ``overlap=True`` as each layer's backward ends (wait-free backpropagation).

    ḡᵗ = (g₀ᵗ + g₁ᵗ + … + gₙ₋₁ᵗ) / n, summed in rank order, so that runs agree bit for bit.

Poseidon (ATC 2017) waits for all layers at the end of the step. With ``update="server"`` we wait
for each layer just before its next forward, and send first what that forward needs first.
"""

from __future__ import annotations

from slipstream.codecs import Dense
from slipstream.codecs.dense import Wire
from slipstream.consistency import Rounds
from slipstream.errors import UnknownStrategy
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.schedules import AfterBackward, Priority, Schedule, WaitFree
from slipstream.strategy import Route, Strategy, Update, everywhere
from slipstream.topologies import Sharded


def push_pull(
    *,
    overlap: bool = True,
    update: Update = "worker",
    wire: Wire = "own",
    chunk_bytes: int = CHUNK_BYTES,
) -> Strategy:
    """Sharded parameter servers, with or without wait-free backpropagation."""
    if update not in ("worker", "server"):
        raise UnknownStrategy(f"push_pull(update={update!r}): choose 'worker' or 'server'")
    gradients = Dense(wire)
    # New weights are not rounded on the way back: rounding would add up over steps.
    results = gradients if update == "worker" else Dense()
    road = Route(Sharded(), push=gradients, publish=results)
    return Strategy(
        "push_pull",
        route=everywhere(road),
        consistency=Rounds(),
        schedule=order_of_leaving(overlap, update),
        update=update,
        chunk_bytes=chunk_bytes,
    )


def order_of_leaving(overlap: bool, update: Update) -> Schedule:
    if not overlap:
        return AfterBackward()
    # Where workers update, the step waits for every layer, so overtaking would gain nothing.
    return Priority() if update == "server" else WaitFree()
