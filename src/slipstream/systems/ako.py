"""Ako (Watcharapichat and others, 2016): no servers, slices of updates to every peer all the time.

- Topology: mesh over point-to-point links; every worker trains and keeps weights of its own.
- Consistency: a worker begins step c only when c < min over its peers of the last step it has
  heard of + p + τ; nobody waits for anything else.
- What travels: the t-th time, worker j sends peer i partition (i − j + t) mod p of the updates that
  have accumulated for that peer; there they are zero from then on. With ``schedule="same"``
  everybody gets partition (j + t) mod p, which takes one accumulator instead of min(p, n − 1).
- When: after a step, if the slice before has left; else the next one is fuller (a merging sender).
- Update: at the worker. Its own is done at once, others' as they arrive.

    uⱼ = F(Wⱼ, gⱼ) − Wⱼ;  Wⱼ ← Wⱼ + c·uⱼ;  aᵢ ← aᵢ + c·uⱼ for every peer i     F its optimizer
    sent = aᵢ[partition];  aᵢ[partition] ← 0;  at peer i: Wᵢ[partition] ← Wᵢ[partition] + sent

    p = ⌈γ·m·(n − 1) / (0.9·B)⌉: steps a second, the model's bytes, and a link's bytes a second

Where we deviate: the paper keeps the last p gradients and subtracts the one that is p steps old,
which breaks when p changes or a slice is left out. Its line 9 gives a peer the same partition for
ever, line 8 applies a worker's own gradient twice, and line 3 lets a worker wait for itself. What
travels is the optimizer's step, so momentum and Adam work, each worker with its own state; c is
1/n, so that a learning rate means what it does elsewhere.
"""

from __future__ import annotations

from typing import Literal

from slipstream.codecs import Dense
from slipstream.consistency import WithinReach
from slipstream.errors import ConfigError
from slipstream.planning.slices import Growth, Slices
from slipstream.schedules import AfterBackward
from slipstream.strategy import Route, Strategy, everywhere
from slipstream.topologies import Mesh
from slipstream.units import bits_per_second

DENSE = Dense()


def ako(
    *,
    partitions: int | Literal["auto"] = "auto",
    staleness: int | None = None,
    schedule: Literal["rotate", "same"] = "rotate",
    rate: str | float | None = None,
    growth: Growth = "none",
    warm_steps: int = 0,
) -> Strategy:
    """Slices of updates from every worker to every other.

    ``partitions`` is p, or "auto": the fewest that the links bear, worked out again as they and
    the workers change. ``staleness`` is τ (by default four steps for each worker). ``rate`` is
    what a worker's link carries ("200mbit"); without it that is measured. ``growth`` "sqrt" or
    "linear" makes n workers move √n or n times as far as the mean of their updates, reached
    gradually within ``warm_steps``.
    """
    if schedule not in ("rotate", "same"):
        raise ConfigError(f"schedule={schedule!r}: choose 'rotate' or 'same'")
    return Strategy(
        "ako",
        route=everywhere(Route(Mesh(), push=DENSE, publish=DENSE)),
        consistency=WithinReach(staleness),
        schedule=AfterBackward(),
        travels="steps",
        outlives_workers=True,
        slices=Slices(
            None if partitions == "auto" else partitions,
            schedule == "same",
            growth,
            warm_steps,
            None if rate is None else bits_per_second(rate) / 8,
        ),
    )
