"""Sets up the training of pairs of a model and an optimizer: ``job.distribute`` on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slipstream.errors import FrameRefused, LaunchError, LeftBehind
from slipstream.methods import PartialExchange, SharedMemoryUpdates
from slipstream.plan import Plan
from slipstream.routes import Collective
from slipstream.runtime.hosts.meeting import find_hosts
from slipstream.runtime.members.joining import Membership
from slipstream.runtime.members.member import HUB, SILENCE_FACTOR_IF_LINK_ALIVE
from slipstream.runtime.servers.shards import LAST, choose_clusters
from slipstream.strategy import Strategy
from slipstream.torch.channels.collective_channel import collective_device
from slipstream.torch.distribute.exchange import HeldTensors
from slipstream.torch.distribute.preparing import agree, as_trained
from slipstream.torch.modes.choosing import mode_for
from slipstream.torch.modes.networked import NetworkedMode, SetupInputs
from slipstream.torch.modes.pair_parts import PairParts
from slipstream.torch.modes.pair_setup import PairSetup, SharedParts
from slipstream.torch.optimizers.shard_optimizer import settings_of
from slipstream.torch.tensors.copying import copy_state
from slipstream.torch.tensors.inventory import Inventory, groups_of
from slipstream.torch.tensors.pairs import Pair, distinct_models
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import Fault, Lost, Message, RouteUpdated
from slipstream.types import OptimizerRecipe, Rank, rank_of

HOST_LEFT_BEHIND = (
    "or another worker of its host was not heard, and the others went on without this host: start "
    "the job again from a checkpoint, or give slipstream.init a longer silence_limit_s"
)


def set_up(
    pairs: Sequence[Pair],
    strategy: Strategy,
    call: str,
    shared: SharedParts,
    before: Sequence[PairParts] = (),
) -> NetworkedMode:
    """Plan, start servers, copy rank 0's state, and make the mode that trains.

    Args:
        pairs: All pairs of the job, those of earlier calls first.
        call: The call that makes the strategy, in messages.
        before: The parts of earlier calls. Those whose plan is still valid are kept.
    """
    membership = shared.membership
    check_start(strategy, membership)
    shared.distributed += 1
    inventories = agree(pairs, strategy, membership, shared.key("model"))
    trained = as_trained(strategy, len(pairs))
    specs = [inventory.specs for inventory in inventories]
    hosts = hosts_of(trained, inventories, shared)
    clusters = choose_clusters(trained, specs, membership, len(shared.shards.addresses), hosts)
    plans = [trained.plan(each, cluster) for each, cluster in zip(specs, clusters, strict=True)]
    roster, plan = membership.member.roster, plans[0]
    roster.lockstep = plan.delivers_every_result and plan.partial_exchange is None
    if plan.consistency.goes_on and not plan.delivers_every_result:
        roster.worker_silence_s = SILENCE_FACTOR_IF_LINK_ALIVE * membership.limits.silence_s
    membership.member.coordination.on_lost = None  # until all can handle a loss
    shared.shards.start(max(cluster.servers for cluster in clusters), membership)
    found = reused_or_new(pairs, plans, inventories, shared, before)
    start_pairs(pairs, found, shared)
    given = SetupInputs(
        strategy.name, call, shared, found, lambda parts: meet(pairs, parts, shared)
    )
    return mode_for(plan)(given)


def hosts_of(
    strategy: Strategy, inventories: Sequence[Inventory], shared: SharedParts
) -> tuple[tuple[Rank, ...], ...]:
    """The ranks of each host, where its workers aggregate first; else nothing.

    NCCL has levels of its own, so models on GPUs whose gradients it sums keep one.
    """
    if not strategy.two_levels:
        return ()
    collective = any(
        isinstance(route.over, Collective) for route in strategy.rounds.routes.routes()
    )
    on_gpu = any(collective_device(each).type == "cuda" for each in inventories)
    return find_hosts(shared.membership, shared.key("hosts"), apart=collective and on_gpu)


def check_start(strategy: Strategy, membership: Membership) -> None:
    """Refuse what needs another way to start.

    Raises:
        LaunchError: Learners that share memory; or a restarted worker where none can come back.
    """
    if isinstance(strategy.method, SharedMemoryUpdates):
        raise LaunchError(
            f"learners of {strategy.name} share memory, which their launcher gives them: start "
            f"them with `slipstream run --workers N --strategy {strategy.name} SCRIPT`"
        )
    if membership.env.incarnation and not isinstance(strategy.method, PartialExchange):
        raise LaunchError(
            f"a worker cannot come back with {strategy.name}: only with partial exchange, "
            "as ako does; start the job again from a checkpoint"
        )


def reused_or_new(
    pairs: Sequence[Pair],
    plans: Sequence[Plan],
    inventories: Sequence[Inventory],
    shared: SharedParts,
    before: Sequence[PairParts],
) -> list[PairSetup | PairParts]:
    """Return each pair's parts of earlier calls, or what new ones are made of."""
    found: list[PairSetup | PairParts] = []
    for number, (pair, plan, inventory) in enumerate(zip(pairs, plans, inventories, strict=True)):
        old = before[number] if number < len(before) else None
        if old is not None and old.plan == plan:
            found.append(old)
            continue
        if old is not None:
            old.close()
            old.shards.release(old.member)
        results = pair.model.results if isinstance(pair.model, HeldTensors) else None
        loop = None if old is None else old.loop
        found.append(PairSetup(pair, plan, inventory, shared, loop, results))
    return found


def start_pairs(
    pairs: Sequence[Pair], found: Sequence[PairSetup | PairParts], shared: SharedParts
) -> None:
    """Give new pairs' plans to the servers, and rank 0's weights to all ranks."""
    membership = shared.membership
    with shared.chain.opened():
        # All at once: servers that update import torch first, which is slow.
        for wait in [configured(each) for each in found if isinstance(each, PairSetup)]:
            wait()
        membership.gathering.gather(shared.key("configured"), True, bool)
        if membership.env.incarnation:
            return
        known = {id(each.model) for each in found if isinstance(each, PairParts)}
        for model in distinct_models([pair for pair in pairs if id(pair.model) not in known]):
            if not (isinstance(model, HeldTensors) and model.released):
                copy_state(shared.chain, model)


def configured(setup: PairSetup) -> Callable[[], None]:
    """Let servers work out the plan; the result waits for them."""
    recipe = None
    if setup.plan.update.user_at_holder:
        recipe = recipe_for(setup.optimizer, setup.inventory)
    return setup.shards.configure(setup.plan, setup.membership, setup.member, recipe)


def recipe_for(optimizer: torch.optim.Optimizer, inventory: Inventory) -> OptimizerRecipe:
    """Describe the user's optimizer to the servers, which run it."""
    groups = groups_of(optimizer)
    return OptimizerRecipe(
        type(optimizer).__name__,
        settings_of(optimizer),
        [groups.get(id(tensor), -1) for tensor in inventory.tensors],
    )


def meet(pairs: Sequence[Pair], parts: Sequence[PairParts], shared: SharedParts) -> None:
    """Wait until all ranks can receive gradients, and handle the loss of a worker from then on.

    Args:
        pairs: The user's own.
    """
    membership, plan = shared.membership, parts[0].plan
    note_unheld(pairs, parts)
    for each in parts if len(parts) > 1 else ():
        each.synchronizer.leave_at_step()
    if plan.consistency.goes_on and plan.delivers_every_result:
        reroute_around_the_lost(parts, membership)
    elif plan.consistency.goes_on and plan.cluster.members:
        end_with_the_host(membership)
    # Restarted workers and NCCL need the store; otherwise it is no longer needed. Before the last
    # gathering: no rank that goes on may meet others, by torch, in a store that is about to close.
    if not any(each.needs_store for each in parts):
        membership.close_store()
    # No rank trains before all ranks can receive a gradient.
    membership.gathering.gather(shared.key("distributed"), True, bool)
    membership.gathering.limit_s = membership.limits.wait_s
    if plan.consistency.goes_on:  # not before: while the job starts, a loss cannot be handled
        go_on_without_the_lost(membership, parts)


def note_unheld(pairs: Sequence[Pair], parts: Sequence[PairParts]) -> None:
    """Name to every pair the parameters whose changes no other worker would get.

    With one pair whose mean gradients are in ``.grad`` after backward, or whose weights themselves
    are averaged, there are none: whoever updates a parameter does so alike on all workers.
    """
    held: set[int] = set()
    for pair, each in zip(pairs, parts, strict=True):
        plan, tensors = each.plan, each.synchronizer.inventory.tensors
        exchanged = {id(tensor) for tensor in tensors}
        if plan.runs_ahead or plan.update.inner.travels == "steps":
            exchanged &= set(groups_of(pair.optimizer))  # what its steps change, and nothing else
        held |= exchanged
    unheld = [
        (name, parameter)
        for model in distinct_models(pairs)
        for name, parameter in model.named_parameters()
        if id(parameter) not in held
    ]
    for each in parts:
        each.synchronizer.gradients.unheld = unheld


def go_on_without_the_lost(membership: Membership, parts: Sequence[PairParts]) -> None:
    """Where rounds do not need every worker, a worker that is stopped for a while is no error.
    Where they do, the remaining workers continue, and the lost one has missed too much to come
    back."""
    member, delivers_every_result = membership.member, parts[0].plan.delivers_every_result
    cluster = parts[0].plan.cluster

    def on_lost(name: str) -> None:
        node = cluster.node_of(rank_of(name))
        if cluster.members and member.name in map("rank {}".format, cluster.ranks_at(node)):
            # Rank 0 is of the same host, so it makes no more rounds either.
            member.coordination.announce(Fault(name, None, membership.limits.silence_s))
            return
        for each in parts:
            each.shards.retire(node, each.member)
        if cluster.members:
            member.send(name, Lost(rank_of(name)), priority=CONTROL)
            for rank in cluster.ranks_at(node):
                member.coordination.give_up(f"rank {rank}")
        if delivers_every_result:
            for rank in range(membership.env.world_size):
                member.send(f"rank {rank}", Lost(rank_of(name)), priority=CONTROL)

    def on_return(name: str) -> None:
        # Messages that were sent while it was unreachable may be lost.
        if member.is_hub:
            member.send(name, Lost(rank_of(name)), priority=CONTROL)

    member.coordination.on_lost = on_lost
    if delivers_every_result or cluster.members:
        member.coordination.on_return = on_return


def why_left_behind(silence_s: float) -> str:
    return (
        f"was not heard for {silence_s:.0f} s, and the others went on without it: it has missed "
        "updates and cannot come back; start it again from a checkpoint, or give slipstream.init a "
        "longer silence_limit_s"
    )


def end_with_the_host(membership: Membership) -> None:
    """What a worker does when rank 0 reports that its host is lost: a host makes no round without
    one of its workers."""
    member = membership.member

    def on_lost(message: Message[Lost]) -> None:
        if message.sender != HUB or message.body.rank != membership.env.rank:
            raise FrameRefused(f"{message.sender} says that rank {message.body.rank} is lost")
        member.fail(LeftBehind(member.name, HOST_LEFT_BEHIND))

    member.on(Lost, on_lost)


def reroute_around_the_lost(parts: Sequence[PairParts], membership: Membership) -> None:
    """What a worker does when rank 0 reports a lost worker."""
    member = membership.member
    channels = [channel for each in parts for channel in each.channels.of_messages]

    def on_lost(message: Message[Lost]) -> None:
        lost = message.body.rank
        if message.sender != HUB:
            raise FrameRefused(f"{message.sender} does not say who is lost")
        if lost == membership.env.rank:
            slices = parts[0].channels.partial
            if slices is not None and not slices.entered:
                return  # it is about the previous incarnation
            member.fail(LeftBehind(member.name, why_left_behind(member.roster.silence_s)))
            return
        if not member.is_hub:
            member.coordination.go_on_without(f"rank {lost}")
        for channel in channels:
            channel.lose(lost)
        for each in parts:
            for name in each.shards.names:
                # On rank 0, this follows its own message that the worker is lost.
                each.member.send(name, RouteUpdated(lost), priority=LAST)

    member.on(Lost, on_lost)
