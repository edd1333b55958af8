"""One worker's part of a distributed model: everything ``job.distribute`` sets up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.errors import (
    ConfigError,
    FrameRefused,
    LaunchError,
    LeftBehind,
    ModelMismatch,
    SlipstreamError,
)
from slipstream.runtime.configuration import OptimizerRecipe
from slipstream.runtime.consensus import Consensus
from slipstream.runtime.exchange import Exchange, LinkExchange, rank_of
from slipstream.runtime.joining import Membership
from slipstream.runtime.link_watch import LinkWatch
from slipstream.runtime.member import HUB, PATIENCE
from slipstream.runtime.partial_exchange import PartialExchange
from slipstream.runtime.portraits import difference
from slipstream.runtime.returning import Doorkeeper
from slipstream.runtime.shard_service import ShardService
from slipstream.runtime.shards import LAST, Shards, choose_cluster
from slipstream.runtime.state_chain import StateChain
from slipstream.runtime.update_stream import UpdateStream
from slipstream.strategy import Plan, Strategy
from slipstream.torch.collective_exchange import CollectiveExchange
from slipstream.torch.compact_exchange import CompactExchange
from slipstream.torch.compact_layers import CompactLayer, named_forms, shape_of
from slipstream.torch.copying import copy_state
from slipstream.torch.finite_gradients import FiniteGradients
from slipstream.torch.flat_weights import FlatWeights
from slipstream.torch.forward_gate import ForwardGate
from slipstream.torch.inventory import (
    Inventory,
    check_optimizer,
    portrait,
    whole_vector,
)
from slipstream.torch.link_store import LinkStore
from slipstream.torch.loop_optimizer import LoopOptimizer
from slipstream.torch.partial_updates import PartialUpdates
from slipstream.torch.residuals import Residuals
from slipstream.torch.server_state import ServerState
from slipstream.torch.server_updates import RemoteOptimizer, ServerUpdates
from slipstream.torch.shard_optimizer import check_elementwise, settings_of
from slipstream.torch.slices import keep_the_door, make_partial
from slipstream.torch.slots import LiveTensors
from slipstream.torch.speeds import measure_speeds
from slipstream.torch.staging import Staging
from slipstream.torch.streamed_updates import StreamedUpdates
from slipstream.torch.synchronizer import Synchronizer, WorkerUpdates
from slipstream.transports.collective import Collectives
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import Lost, Message, Rerouted


@dataclass(frozen=True, slots=True)
class Replica:
    """The parts, wired together."""

    plan: Plan
    synchronizer: Synchronizer
    optimizer: torch.optim.Optimizer
    exchanges: tuple[Exchange, ...]
    shards: Shards
    chain: StateChain
    server_state: ServerState | None
    gate: ForwardGate | None
    collectives: Collectives | None
    compact: CompactExchange | None = None
    service: ShardService | None = None
    residuals: Residuals | None = None
    consensus: Consensus | None = None
    doorkeeper: Doorkeeper | None = None

    @property
    def partial(self) -> PartialExchange | None:
        return next((e for e in self.exchanges if isinstance(e, PartialExchange)), None)

    @property
    def link_exchanges(self) -> tuple[LinkExchange, ...]:
        return tuple(e for e in self.exchanges if isinstance(e, LinkExchange))

    @property
    def round(self) -> int:
        """The round that is open, as far as this worker knows, where rounds can be missed."""
        return max(exchange.told_round for exchange in self.link_exchanges)

    def open_round(self) -> int:
        """The round that this worker makes next; waits for word of it."""
        return max(exchange.open_round() for exchange in self.link_exchanges)

    def bytes(self) -> tuple[Counter[str], Counter[str]]:
        """Payload sent and received, by scheme."""
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()
        for exchange in self.exchanges:
            sent += exchange.sent
            received += exchange.received
        return sent, received

    def close(self) -> None:
        self.synchronizer.close()
        if self.gate is not None:
            self.gate.remove()
        if self.collectives is not None:
            self.collectives.close()
        self.shards.close()


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy) -> Inventory:
    """What will be exchanged; refuses what cannot work, before anything starts."""
    check_optimizer(model, optimizer)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "SparseAdam takes sparse gradients only, and the mean over workers is dense: use Adam"
        )
    if isinstance(optimizer, torch.optim.LBFGS) and not strategy.consistency.lockstep:
        raise ConfigError(
            "LBFGS runs backward itself, several times a step, so nobody can run ahead of its "
            "updates: use another optimizer, or rounds of all workers, such as push_pull()"
        )
    inventory = Inventory.of(model)
    if not inventory.specs:
        raise ConfigError("the model has no parameter that requires a gradient")
    if strategy.slices is not None:
        FlatWeights(inventory)
    if strategy.update != "server":
        return inventory
    check_elementwise(optimizer)
    if optimizer.state:
        raise ConfigError(
            "the optimizer already has state, which update='server' would not take over: give a "
            "new one, and use job.load to continue from a checkpoint"
        )
    groups = groups_of(optimizer)
    kept = {
        i
        for i, (spec, tensor) in enumerate(zip(inventory.specs, inventory.tensors, strict=True))
        if spec.role == "buffer" or id(tensor) in groups
    }
    return inventory.only(kept)


def groups_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    return {
        id(parameter): g
        for g, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def agree(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    membership: Membership,
) -> Inventory:
    """``prepare`` on every rank; an error of one, or a difference, is the same error on all."""
    problem, inventory = None, None
    try:
        inventory = prepare(model, optimizer, strategy)
    except SlipstreamError as error:
        problem = error
    lines = [] if inventory is None else portrait(model, optimizer)
    if inventory is not None:
        lines += strategy.portrait(inventory.specs, membership.env.world_size)
        lines.append(f"servers: {membership.env.servers or 'one a host'}")
    said = membership.gathering.gather("model", [str(problem or ""), lines], list[Any])
    if problem is not None:
        raise problem
    for rank, (trouble, other) in enumerate(said):
        if trouble:
            raise ConfigError(f"rank {rank}: {trouble}")
        if other != said[0][1]:
            raise ModelMismatch(difference(rank, said[0][1], other, "rank 0"))
    assert inventory is not None
    return inventory


def replicate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    membership: Membership,
) -> Replica:
    """Plan, start servers, copy rank 0's state, and hook into the model."""
    if strategy.one_machine is not None:
        raise LaunchError(
            f"learners of {strategy.name} share memory, which their launcher gives them: start "
            f"them with `slipstream run --workers N --strategy {strategy.name} SCRIPT`"
        )
    if membership.env.life and strategy.slices is None:
        raise LaunchError(
            f"a worker cannot come back with {strategy.name}: only where workers exchange slices, "
            "as ako does; start the job again from a checkpoint"
        )
    inventory = agree(model, optimizer, strategy, membership)
    plan = strategy.plan(inventory.specs, choose_cluster(strategy, inventory.specs, membership))
    shards = Shards()
    membership.member.lockstep = plan.together and plan.slices is None
    goes_on = plan.outlives_workers or plan.consistency.agreed or plan.consistency.alone
    if goes_on and not plan.together:
        membership.member.roster.worker_silence_s = PATIENCE * membership.limits.silence_s
    try:
        shards.start(plan, membership)
        replica = _wire(model, optimizer, plan, inventory, shards, membership)
    except BaseException:
        shards.close()
        raise
    if goes_on:  # not before: nobody could handle a loss while the job starts
        go_on_without_the_lost(membership, shards, plan)
    return replica


def go_on_without_the_lost(membership: Membership, shards: Shards, plan: Plan) -> None:
    """Where rounds do not need every worker, one that is stopped for a while is not an error; where
    they do, the rest make them without it, and it has missed too much to come back."""
    member = membership.member

    def on_lost(name: str) -> None:
        shards.retire(rank_of(name), member)
        if plan.together:
            for rank in range(membership.env.world_size):
                member.send(f"rank {rank}", Lost(rank_of(name)), priority=CONTROL)

    def on_return(name: str) -> None:
        # What was sent while it could not be reached may be lost.
        if member.is_hub:
            member.send(name, Lost(rank_of(name)), priority=CONTROL)

    member.on_lost = on_lost
    if plan.together:
        member.on_return = on_return


def left_behind(silence_s: float) -> str:
    return (
        f"was not heard for {silence_s:.0f} s, and the others went on without it: it has missed "
        "updates and cannot come back; start it again from a checkpoint, or give slipstream.init a "
        "longer silence_limit_s"
    )


def reroute_around_the_lost(
    exchanges: Sequence[Exchange], shards: Shards, membership: Membership
) -> None:
    """What a worker does when rank 0 has lost another one."""
    member = membership.member

    def on_lost(message: Message) -> None:
        assert isinstance(message.body, Lost)
        lost = message.body.rank
        if message.sender != HUB:
            raise FrameRefused(f"{message.sender} does not say who is lost")
        if lost == membership.env.rank:
            if not all(e.entered for e in exchanges if isinstance(e, PartialExchange)):
                return  # it is about the life before
            member.fail(LeftBehind(member.name, left_behind(member.roster.silence_s)))
            return
        if not member.is_hub:
            member.lost.append(f"rank {lost}")
        for exchange in exchanges:
            if isinstance(exchange, LinkExchange | PartialExchange):
                exchange.lose(lost)
        for k in range(len(shards.addresses)):
            # Rank 0's after its word that this one is lost.
            member.send(f"server {k}", Rerouted(lost), priority=LAST)

    member.on(Lost, on_lost)


def _wire(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    inventory: Inventory,
    shards: Shards,
    membership: Membership,
) -> Replica:
    env, member, limits = membership.env, membership.member, membership.limits
    by_server = plan.update == "server"
    recipe = recipe_for(optimizer, inventory) if by_server else None
    chain = StateChain(env.rank, env.world_size, member, limits.wait_s)
    shards.configure(plan, membership, recipe)
    membership.gathering.gather("configured", True, bool)
    if not env.life:
        copy_state(chain, model)
    chain.open = False
    numel = len(whole_vector(model))
    consensus = Consensus(env.rank, env.world_size, member, numel, limits.wait_s)
    finite = FiniteGradients(
        env.nonfinite, env.rank, lambda: membership.gathering.is_first("nonfinite")
    )
    slots = LiveTensors(plan, inventory, Staging(), finite)
    exchanges, collectives = make_exchanges(plan, inventory, slots, shards, membership)
    door = None
    for exchange in exchanges:
        if isinstance(exchange, PartialExchange):
            door = keep_the_door(model, plan, exchange, chain, member)
    if plan.outlives_workers and plan.together:
        reroute_around_the_lost(exchanges, shards, membership)
    compact = make_compact(model, plan, inventory, exchanges, membership, finite)
    if compact is not None:
        exchanges = (compact, *exchanges)
    parts = (model, plan, inventory, slots, exchanges)
    server_state, gate, service = None, None, make_service(plan, membership)
    synchronizer: Synchronizer
    if by_server:
        remote = RemoteOptimizer(optimizer)
        synchronizer = remote.synchronizer = ServerUpdates(remote, *parts)
        server_state = ServerState(plan, inventory, member, limits.wait_s)
        for exchange in exchanges:
            exchange.settings = synchronizer.settings
        index_of = {id(tensor): i for i, tensor in enumerate(inventory.tensors)}
        gate = ForwardGate(model, index_of, synchronizer.wait, synchronizer.begin_forward)
        if env.rank == 0:
            server_state.send_weights()
            assert service is not None
            service.accounts()  # answered after the weights have come: nobody updates before
        optimizer = remote
    elif plan.slices is not None:
        loop = LoopOptimizer(optimizer)
        synchronizer = loop.synchronizer = PartialUpdates(optimizer, *parts)
        optimizer = loop
    elif runs_ahead(plan):
        loop = LoopOptimizer(optimizer)
        synchronizer = loop.synchronizer = StreamedUpdates(optimizer, *parts)
        optimizer = loop
    else:
        synchronizer = WorkerUpdates(optimizer, *parts)
    for exchange in exchanges:
        if isinstance(exchange, LinkExchange):
            exchange.rate = RateShare(optimizer)
            servers = [plan.cluster.name(node) for node in plan.cluster.server_nodes]
            elsewhere = [name for name in servers if name not in shards.beside]
            links = LinkWatch(member.transport, elsewhere, plan.narrow_below, time.monotonic)
            exchange.narrow = links.narrow
    if compact is not None:
        synchronizer.capture_compact(compact)
    # Nobody trains before everybody can take a gradient.
    membership.gathering.gather("distributed", True, bool)
    membership.gathering.limit_s = limits.wait_s
    if plan.slices is None and (collectives is None or collectives.device.type != "cuda"):
        membership.close_store()  # else workers that come back meet there, or NCCL uses it
    return Replica(
        plan,
        synchronizer,
        optimizer,
        exchanges,
        shards,
        chain,
        server_state,
        gate,
        collectives,
        compact,
        service,
        make_residuals(plan, exchanges, membership),
        consensus,
        door,
    )


def runs_ahead(plan: Plan) -> bool:
    """Whether updates are applied by workers that need not have waited for them."""
    later = not plan.consistency.lockstep or plan.travels == "steps"
    return plan.update == "worker" and later and plan.slices is None


class RateShare:
    """The learning rate as a part of the highest there has been: what it began with, or more.

    Of an optimizer without one, or with one that it finds for itself, it is always all of it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._highest = 0.0

    def __call__(self) -> float:
        groups = self._optimizer.param_groups
        now, began = (highest_of(groups, name) for name in ("lr", "initial_lr"))
        self._highest = max(self._highest, now, began)
        return now / self._highest if self._highest > 0 else 1.0


def highest_of(groups: Sequence[dict[str, Any]], name: str) -> float:
    numbers = int | float | torch.Tensor
    return max((float(g[name]) for g in groups if isinstance(g.get(name), numbers)), default=0.0)


def make_service(plan: Plan, membership: Membership) -> ShardService | None:
    """Where servers update, they deal batches; and their accounts are worth asking for, as they are
    where workers may be lost."""
    if not plan.cluster.servers or (plan.update != "server" and not plan.outlives_workers):
        return None
    return ShardService(plan.cluster.servers, membership.member, membership.limits.wait_s)


def make_residuals(
    plan: Plan, exchanges: Sequence[Exchange], membership: Membership
) -> Residuals | None:
    """What brings codecs' memories into checkpoints, where gradients travel over links."""
    links = [exchange for exchange in exchanges if isinstance(exchange, LinkExchange)]
    if plan.update == "server" or not links:
        return None
    return Residuals(plan, links[0], membership.member, membership.limits.wait_s)


def recipe_for(optimizer: torch.optim.Optimizer, inventory: Inventory) -> OptimizerRecipe:
    groups = groups_of(optimizer)
    return OptimizerRecipe(
        type(optimizer).__name__,
        settings_of(optimizer),
        [groups.get(id(tensor), -1) for tensor in inventory.tensors],
    )


def make_exchanges(
    plan: Plan,
    inventory: Inventory,
    slots: LiveTensors,
    shards: Shards,
    membership: Membership,
) -> tuple[tuple[Any, ...], Collectives | None]:
    """One exchange for each road the plan uses."""
    exchanges: list[Any] = []
    collectives = None
    roads = {route.road for route in plan.routes}
    if "collective" in roads:
        device = collective_device(inventory)
        # NCCL copies the store it is given, which only torch's own can be.
        on_links = device.type != "cuda"
        collectives = Collectives(
            LinkStore(membership.gathering) if on_links else membership.rendezvous.store,
            membership.env.rank,
            membership.env.world_size,
            host=membership.host,
            device=device,
            limit_s=membership.limits.wait_s,
            check=membership.member.check,
            grace_s=membership.limits.silence_s + 2,
        )
        exchanges.append(
            CollectiveExchange(
                plan, inventory.tensors, collectives, membership.member, slots.finite
            )
        )
    if plan.slices is not None:
        exchanges.append(make_partial(plan, plan.slices, inventory, membership))
    elif "links" in roads:
        kind = UpdateStream if runs_ahead(plan) else LinkExchange
        exchanges.append(
            kind(
                membership.env.rank,
                plan,
                membership.member,
                slots,
                beside=shards.beside,
                limit_s=membership.limits.wait_s,
            )
        )
    return tuple(exchanges), collectives


def make_compact(
    model: nn.Module,
    plan: Plan,
    inventory: Inventory,
    dense: tuple[Exchange, ...],
    membership: Membership,
    finite: FiniteGradients,
) -> CompactExchange | None:
    """The exchange of layers that may travel in compact form, if the strategy wants that."""
    layers = compact_layers(model, plan, inventory)
    if plan.hybrid is None or not layers:
        return None
    speeds = measure_speeds(membership) if plan.hybrid.needs_speeds else None
    return CompactExchange(
        membership.env.rank,
        plan,
        layers,
        plan.hybrid,
        speeds,
        inventory.tensors,
        dense,
        membership.member,
        limit_s=membership.limits.wait_s,
        finite=finite,
    )


def compact_layers(model: nn.Module, plan: Plan, inventory: Inventory) -> list[CompactLayer]:
    """In forward order, like the plan's tensors."""
    index_of = {id(tensor): i for i, tensor in enumerate(inventory.tensors)}
    wanted = {spec.layer for spec in plan.specs if spec.layer}
    layers = []
    for name, module, form, _ in named_forms(model):
        if name in wanted:
            bias: Any = getattr(module, "bias", None)
            weight = index_of[id(module.weight)]
            place = None if bias is None else index_of[id(bias)]
            layers.append(CompactLayer(shape_of(name, module, form), module, weight, place))
    return layers


def collective_device(inventory: Inventory) -> torch.device:
    """NCCL where all parameters are on one CUDA device; the CPU otherwise."""
    devices = {tensor.device for tensor in inventory.tensors}
    device = next(iter(devices))
    return device if len(devices) == 1 and device.type == "cuda" else torch.device("cpu")
