"""Builds a plan's channels, for training and for simulations; does not import torch."""

from __future__ import annotations

from collections.abc import Collection

from slipstream.codecs.matrices import LayerMath
from slipstream.plan import Plan
from slipstream.runtime.exchange.channel import Slots
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.exchange.update_stream import UpdateStream
from slipstream.runtime.members.endpoint import Endpoint


def round_channel(
    rank: int,
    plan: Plan,
    member: Endpoint,
    slots: Slots,
    *,
    math: LayerMath | None = None,
    colocated: Collection[str] = (),
    limit_s: float,
) -> RoundChannel:
    """The channel of all units that are sent over links.

    Where results are increments and workers may run ahead of them, every result is applied, in
    order.
    """
    kind = UpdateStream if plan.runs_ahead else RoundChannel
    return kind(rank, plan, member, slots, math=math, colocated=colocated, limit_s=limit_s)
