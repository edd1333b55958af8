"""Sets up partial exchange, and the return of a restarted worker."""

from __future__ import annotations

import time

import torch
from torch import nn

from slipstream.methods import PartialExchange
from slipstream.plan import Plan
from slipstream.runtime.exchange.state_chain import StateChain
from slipstream.runtime.gossip.gossip import GossipChannel
from slipstream.runtime.gossip.handover import Joiner
from slipstream.runtime.gossip.pace import Pace
from slipstream.runtime.members.joining import Membership
from slipstream.torch.channels.speeds import measure_link
from slipstream.torch.tensors.copying import staged
from slipstream.torch.tensors.flat_weights import FlatWeights
from slipstream.torch.tensors.inventory import whole_state
from slipstream.transports.wire import Welcome
from slipstream.types import ITEM_BYTES

UNKNOWN_BYTES_S = 1e9


def make_partial(
    rule: PartialExchange, weights: FlatWeights, membership: Membership
) -> GossipChannel:
    """The channel of partial exchange."""
    env, transport = membership.env, membership.transport
    peers = [rank for rank in range(env.world_size) if rank != env.rank]
    # A restarted worker gets the rate from rank 0.
    bytes_s = rule.bytes_s or (UNKNOWN_BYTES_S if env.incarnation else measure_link(membership) / 8)
    names = [f"rank {rank}" for rank in peers]
    model_bytes = weights.numel * ITEM_BYTES["float32"]
    pace = Pace(rule, model_bytes, names, bytes_s, transport, time.monotonic)
    return GossipChannel(
        env.rank,
        rule,
        membership.member,
        weights,
        peers,
        pace,
        limit_s=membership.limits.wait_s,
        incarnation=env.incarnation,
    )


def come_back(
    model: nn.Module,
    plan: Plan,
    exchange: GossipChannel,
    chain: StateChain,
    membership: Membership,
) -> Welcome:
    """Take the weights of a job that has continued; returns its current position.

    Trained weights arrive as updates, added to zeros; other tensors as they are at rank 0.
    """
    exchange.weights.clear()
    others = set(range(1, membership.env.world_size)) - {membership.env.rank}
    chain.among(others)
    with chain.opened():
        welcome = Joiner(exchange, membership.member, membership.limits.wait_s).come_back()
        chain.sync = welcome.standing[-1]
        chain.run(*staged(untrained(model, plan)))
        chain.sync -= 1  # the other ranks have not taken part
    chain.among(())
    return welcome


def untrained(model: nn.Module, plan: Plan) -> list[torch.Tensor]:
    """All tensors of a model that are not sent as updates."""
    trained = {spec.name for spec in plan.specs if spec.role == "parameter"}
    return [tensor for name, tensor in whole_state(model) if name not in trained]


def give_untrained(model: nn.Module, plan: Plan, chain: StateChain, name: str) -> None:
    """Send a returning worker the tensors that no update changes."""
    # Copies: the next forward may change statistics before they have left.
    views, _ = staged([tensor.clone() for tensor in untrained(model, plan)])
    chain.send_to(name, chain.sync, views)
