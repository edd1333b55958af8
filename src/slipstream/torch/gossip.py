"""Setting up workers that exchange slices, and one that comes back to them."""

from __future__ import annotations

import time

import torch
from torch import nn

from slipstream.codecs import Rotate
from slipstream.consistency import LagBehindPeers
from slipstream.plan import Plan
from slipstream.runtime.exchange.gossip import GossipChannel
from slipstream.runtime.exchange.handover import JoinCoordinator, Joiner, JoinPeer
from slipstream.runtime.exchange.pace import Pace
from slipstream.runtime.exchange.state_chain import StateChain
from slipstream.runtime.members.joining import Membership
from slipstream.runtime.members.member import Member
from slipstream.torch.copying import staged
from slipstream.torch.flat_weights import FlatWeights
from slipstream.torch.inventory import Inventory, whole_state
from slipstream.torch.speeds import measure_link
from slipstream.transports.wire import Welcome
from slipstream.types import ITEM_BYTES

UNKNOWN_BYTES_S = 1e9


def make_partial(
    plan: Plan, rotate: Rotate, inventory: Inventory, membership: Membership
) -> GossipChannel:
    """The exchange where workers send each other slices."""
    env, transport = membership.env, membership.transport
    weights = FlatWeights(inventory)
    peers = [rank for rank in range(env.world_size) if rank != env.rank]
    # One that comes back is told by rank 0.
    bytes_s = rotate.bytes_s or (
        UNKNOWN_BYTES_S if env.incarnation else measure_link(membership) / 8
    )
    names = [f"rank {rank}" for rank in peers]
    model_bytes = weights.numel * ITEM_BYTES["float32"]
    pace = Pace(rotate, model_bytes, names, bytes_s, transport, time.monotonic)
    gate = plan.consistency.gate
    assert isinstance(gate, LagBehindPeers)
    return GossipChannel(
        env.rank,
        rotate,
        gate,
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
    """Take the weights of a job that has gone on; where it stands.

    Trained weights come as updates, added to zeros; the rest as it is at rank 0.
    """
    exchange.weights.clear()
    others = set(range(1, membership.env.world_size)) - {membership.env.rank}
    chain.among(others)
    with chain.opened():
        welcome = Joiner(exchange, membership.member, membership.limits.wait_s).come_back()
        chain.sync = welcome.standing[-1]
        chain.run(*staged(untrained(model, plan)))
        chain.sync -= 1  # the others have not taken part
    chain.among(())
    return welcome


def untrained(model: nn.Module, plan: Plan) -> list[torch.Tensor]:
    """All of a model that does not travel as updates."""
    trained = {spec.name for spec in plan.specs if spec.role == "parameter"}
    return [tensor for name, tensor in whole_state(model) if name not in trained]


def accept_joiners(
    model: nn.Module, plan: Plan, exchange: GossipChannel, chain: StateChain, member: Member
) -> JoinCoordinator | None:
    """Let workers that have died come back; returns rank 0's part in that, at rank 0."""
    if not member.is_hub:
        JoinPeer(exchange, member)
        return None
    coordinator = JoinCoordinator(exchange, member, plan.cluster.workers)

    def give(name: str) -> None:
        # Copies: the next forward may change statistics before they have left.
        views, _ = staged([tensor.clone() for tensor in untrained(model, plan)])
        chain.send_to(name, chain.sync, views)

    coordinator.give = give
    return coordinator
