"""Ako (Watcharapichat and others, 2016): partial exchange of updates between peers, no servers.

- Topology: mesh over point-to-point links; every worker trains its own weights.
- Consistency: a worker begins step c only when c < min over its peers of their last known
  step + p + τ; it waits for nothing else.
- What is sent: the t-th time, worker j sends peer i partition (i − j + t) mod p of the updates that
  have accumulated for that peer, and sets that partition to zero. With ``schedule="same"``
  every peer gets partition (j + t) mod p, which needs one accumulator instead of min(p, n − 1).
- When: after a step, if the partition before has been sent; else updates accumulate (merging
  sender).
- Update: at the worker. It applies its own update at once, those of peers as they arrive.

    uⱼ = F(Wⱼ, gⱼ) − Wⱼ;  Wⱼ ← Wⱼ + c·uⱼ;  aᵢ ← aᵢ + c·uⱼ for every peer i     F its optimizer
    sent = aᵢ[partition];  aᵢ[partition] ← 0;  at peer i: Wᵢ[partition] ← Wᵢ[partition] + sent

    p = ⌈γ·m·(n − 1) / (0.9·B)⌉: γ steps per second, a model of m bytes, links of B bytes per second

Deviations: the paper keeps the last p gradients and subtracts the one that is p steps old,
which breaks when p changes or a partition is skipped. Its line 9 gives a peer the same partition
for ever, line 8 applies a worker's own gradient twice, and line 3 lets a worker wait for itself. We
send the optimizer's update, so momentum and Adam work, each worker with its own state; c is
1/n, so that a learning rate has its usual meaning.

References:
    Watcharapichat, Lopez Morales, Castro Fernandez and Pietzuch: Ako: Decentralised Deep Learning
    with Partial Gradient Exchange (2016).
"""

from __future__ import annotations

from typing import Literal

from slipstream.codecs import Above
from slipstream.errors import ConfigError
from slipstream.methods import Growth, PartialExchange
from slipstream.strategy import Strategy
from slipstream.systems.parameter_flow import Delta, threshold
from slipstream.units import bits_per_second


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
    """Exchange updates in partitions between all workers, without servers.

    Args:
        partitions: p, or "auto": the fewest with which links are not overloaded, recomputed when
            links and workers change.
        staleness: τ; by default four steps for each worker.
        schedule: "rotate", or "same": all peers get the same partition at a time.
        rate: The rate of a worker's link, such as "200mbit"; by default it is measured.
        growth: "sqrt" or "linear" make n workers move √n or n times as far as the mean of their
            updates.
        warm_steps: Reach this growth linearly within so many steps.
        delta: Hold back entries of a partition up to this value; "90%": the smallest 90%.

    Raises:
        ConfigError: A value is invalid.

    >>> ako(partitions=4, staleness=8).method.partitions
    4
    """
    if schedule not in ("rotate", "same"):
        raise ConfigError(f"schedule={schedule!r}: choose 'rotate' or 'same'")
    return Strategy(
        "ako",
        PartialExchange(
            partitions=None if partitions == "auto" else partitions,
            staleness=staleness,
            bytes_s=None if rate is None else bits_per_second(rate) / 8,
            held_back=None if delta is None else Above(threshold(delta), decay="constant"),
            same_for_all=schedule == "same",
            growth=growth,
            warm_steps=warm_steps,
        ),
    )
