"""Setting up workers that exchange slices, and one that comes back to them."""

from __future__ import annotations

import time

import torch
from torch import nn

from slipstream.consistency import WithinReach
from slipstream.planning.slices import Slices
from slipstream.runtime.joining import Membership
from slipstream.runtime.member import Member
from slipstream.runtime.pace import Pace
from slipstream.runtime.partial_exchange import PartialExchange
from slipstream.runtime.returning import Doorkeeper, Neighbour, Returner
from slipstream.runtime.state_chain import StateChain
from slipstream.strategy import Plan
from slipstream.torch.copying import staged
from slipstream.torch.flat_weights import FlatWeights
from slipstream.torch.inventory import Inventory, whole_state
from slipstream.torch.speeds import measure_link
from slipstream.transports.wire import Welcome
from slipstream.types import ITEM_BYTES

UNKNOWN_BYTES_S = 1e9


def make_partial(
    plan: Plan, slices: Slices, inventory: Inventory, membership: Membership
) -> PartialExchange:
    """The exchange where workers send each other slices."""
    env, transport = membership.env, membership.transport
    weights = FlatWeights(inventory)
    peers = [rank for rank in range(env.world_size) if rank != env.rank]
    # One that comes back is told by rank 0.
    bytes_s = slices.bytes_s or (UNKNOWN_BYTES_S if env.life else measure_link(membership) / 8)
    names = [f"rank {rank}" for rank in peers]
    model_bytes = weights.numel * ITEM_BYTES["float32"]
    pace = Pace(slices, model_bytes, names, bytes_s, transport, time.monotonic)
    assert isinstance(plan.consistency, WithinReach)
    return PartialExchange(
        env.rank,
        slices,
        plan.consistency,
        membership.member,
        weights,
        peers,
        pace,
        limit_s=membership.limits.wait_s,
        life=env.life,
    )


def come_back(
    model: nn.Module,
    plan: Plan,
    exchange: PartialExchange,
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
        welcome = Returner(exchange, membership.member, membership.limits.wait_s).come_back()
        chain.sync = welcome.standing[-1]
        chain.run(*staged(untrained(model, plan)))
        chain.sync -= 1  # the others have not taken part
    chain.among(())
    return welcome


def untrained(model: nn.Module, plan: Plan) -> list[torch.Tensor]:
    trained = {spec.name for spec in plan.specs if spec.role == "parameter"}
    return [tensor for name, tensor in whole_state(model) if name not in trained]


def keep_the_door(
    model: nn.Module, plan: Plan, exchange: PartialExchange, chain: StateChain, member: Member
) -> Doorkeeper | None:
    """Who has died may come back, where workers exchange slices."""
    if not member.is_hub:
        Neighbour(exchange, member)
        return None
    door = Doorkeeper(exchange, member, plan.cluster.workers)

    def give(name: str) -> None:
        # Copies: the next forward may change statistics before they have left.
        views, _ = staged([tensor.clone() for tensor in untrained(model, plan)])
        chain.send_to(name, chain.sync, views)

    door.give = give
    return door
