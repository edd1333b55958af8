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

from slipstream.codecs import Above, Filter, InPlace, Rotate
from slipstream.consistency import Consistency, Each, LagBehindPeers
from slipstream.errors import ConfigError
from slipstream.routes import Everywhere, Route
from slipstream.schedules import Merging
from slipstream.strategy import Strategy
from slipstream.systems.parameter_flow import Delta, threshold
from slipstream.topologies import Mesh
from slipstream.units import bits_per_second
from slipstream.updates import Add, Growth, Update, UserSteps


def ako(
    *,
    partitions: int | Literal["auto"] = "auto",
    staleness: int | None = None,
    schedule: Literal["rotate", "same"] = "rotate",
    rate: str | float | None = None,
    growth: Growth = "none",
    warm_steps: int = 0,
    delta: Delta | None = None,
) -> Strategy:
    """Slices of updates from every worker to every other.

    Args:
        partitions: p, or "auto": the fewest that the links bear, computed again as they and the
            workers change.
        staleness: τ; by default four steps for each worker.
        schedule: "rotate", or "same": every peer gets the same partition at a time.
        rate: What a worker's link carries, such as "200mbit"; by default it is measured.
        growth: "sqrt" or "linear" make n workers move √n or n times as far as the mean of their
            updates.
        warm_steps: After how many steps they do; until then this grows linearly.
        delta: Entries of a partition up to this value wait, too; "90%": the smallest 90%.

    Returns:
        The strategy.

    Raises:
        ConfigError: A value makes no sense.

    >>> ako(partitions=4, staleness=8).rotation.partitions
    4
    """
    if schedule not in ("rotate", "same"):
        raise ConfigError(f"schedule={schedule!r}: choose 'rotate' or 'same'")
    rotate = Rotate(
        None if partitions == "auto" else partitions,
        schedule == "same",
        None if rate is None else bits_per_second(rate) / 8,
        None if delta is None else Above(threshold(delta), decay="constant"),
    )
    return Strategy(
        "ako",
        Everywhere(Route(Mesh(), up=Filter(rotate), down=InPlace())),
        Consistency(Each(), LagBehindPeers(staleness)),
        Update(UserSteps(own="kept"), Add(at="worker", growth=growth, warm_steps=warm_steps)),
        Merging(),
    )
