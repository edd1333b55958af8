"""One worker's part of a distributed model: everything ``job.distribute`` sets up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from slipstream.plan import Plan
from slipstream.routes import Collective
from slipstream.runtime.exchange.assembly import round_channel
from slipstream.runtime.exchange.channel import Channel, Slots
from slipstream.runtime.exchange.choices import LayerChoices
from slipstream.runtime.exchange.consensus import Consensus
from slipstream.runtime.exchange.engine import Applier
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.exchange.state_chain import StateChain
from slipstream.runtime.exchange.transfer import Transfer
from slipstream.runtime.exchange.update_stream import UpdateStream
from slipstream.runtime.gossip.gossip import GossipChannel
from slipstream.runtime.gossip.handover import JoinCoordinator
from slipstream.runtime.hosts.follower import HostFollower
from slipstream.runtime.hosts.layers import HostLayers
from slipstream.runtime.hosts.leader import HostLeader, HostSlots
from slipstream.runtime.hosts.meeting import meet
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.members.joining import Membership
from slipstream.runtime.members.link_watch import LinkWatch
from slipstream.runtime.servers.shard_service import ShardService
from slipstream.runtime.servers.shards import Shards
from slipstream.torch.capture.assigned_gradients import AssignedGradients
from slipstream.torch.capture.compact_gradients import CompactGradients
from slipstream.torch.capture.remote_optimizer import RemoteOptimizer
from slipstream.torch.capture.replica_check import ReplicaCheck, keeps_replicas_equal
from slipstream.torch.capture.synchronizer import Synchronizer
from slipstream.torch.channels.collective_channel import (
    CollectiveChannel,
    collective_device,
    collectives_for,
)
from slipstream.torch.channels.host_gradients import HostExchange, HostGradients, LayerResults
from slipstream.torch.channels.speeds import measure_speeds
from slipstream.torch.channels.worker_channels import Channels
from slipstream.torch.checkpoints.kept_state import KeptState, StateAtWorker
from slipstream.torch.checkpoints.loaded_weights import LoadedWeights, PostedDigests
from slipstream.torch.checkpoints.outer_weights import OuterState, OuterWeights
from slipstream.torch.checkpoints.residuals import Residuals
from slipstream.torch.checkpoints.server_state import ServerState
from slipstream.torch.distribute.exchange import HeldTensors
from slipstream.torch.modes.gossip import accept_joiners, make_partial
from slipstream.torch.modes.outer_updates import OuterUpdates
from slipstream.torch.modes.partial_updates import PartialUpdates
from slipstream.torch.modes.server_updates import ServerUpdates, keep_at_servers
from slipstream.torch.modes.streamed_updates import StreamedUpdates
from slipstream.torch.modes.worker_updates import WorkerUpdates
from slipstream.torch.optimizers.loop_optimizer import LoopOptimizer
from slipstream.torch.optimizers.shard_optimizer import settings_of
from slipstream.torch.tensors.averages import Averages
from slipstream.torch.tensors.compact_layers import CompactLayer, named_forms
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.torch.tensors.flat_weights import FlatWeights
from slipstream.torch.tensors.inventory import Inventory, groups_of, is_constant, whole_vector
from slipstream.torch.tensors.layer_math import TorchLayerMath
from slipstream.torch.tensors.pairs import Pair
from slipstream.torch.tensors.rate_share import RateShare
from slipstream.torch.tensors.slots import GradientPlaces, LiveTensors
from slipstream.torch.tensors.staging import Staging
from slipstream.torch.tensors.written_weights import WrittenWarning
from slipstream.types import OptimizerRecipe


@dataclass(slots=True)
class SharedParts:
    """The parts that all pairs of a job share, on one worker.

    Attributes:
        shards: all servers.
        transfer: moves state of the job, and of pair 0.
        chain: copies rank 0's state to all ranks.
        consensus: computes the mean of the first pair's weights.
        wired: how many replicas were made; the next one's messages carry this number.
        calls: how often ``job.distribute`` was called.
    """

    membership: Membership
    shards: Shards
    transfer: Transfer
    chain: StateChain
    consensus: Consensus
    wired: int = 0
    calls: int = 0

    @classmethod
    def of(cls, membership: Membership, first: Pair) -> SharedParts:
        """The parts of a job before its first pair is set up.

        Args:
            first: The pair whose weights ``job.consensus`` averages.
        """
        env, member, limit_s = membership.env, membership.member, membership.limits.wait_s
        transfer = Transfer(member)
        chain = StateChain(env.rank, env.world_size, transfer, limit_s)
        numel = len(whole_vector(first.model))
        consensus = Consensus(env.rank, env.world_size, transfer, numel, limit_s)
        return cls(membership, Shards(), transfer, chain, consensus)

    def key(self, what: str) -> str:
        """The name of a gathering, a new one in every call of ``job.distribute``."""
        return what if self.calls == 1 else f"{what}/{self.calls}"

    def next_endpoint(self) -> Endpoint:
        """The endpoint of the next replica."""
        self.wired += 1
        return self.membership.member.for_pair(self.wired - 1).owned()

    def close(self) -> None:
        self.shards.close()


@dataclass(frozen=True, slots=True)
class Replica:
    """One pair's parts, wired together.

    Attributes:
        optimizer: what the training loop uses: the user's own, or a ``LoopOptimizer``.
        compact: captures layers that may be sent in compact form, if there are any.
        service: sends requests to servers, where these deal batches or keep accounts.
        state: the optimizer's state and averaged weights, here or at servers.
        residuals: saves codecs' residuals in checkpoints, where gradients are sent over links.
        join_coordinator: rank 0's, where workers may come back.
        outer: the weights of outer rounds, where workers train on their own between these.
        check: compares replicas, where they are equal after each step.
    """

    plan: Plan
    synchronizer: Synchronizer
    optimizer: torch.optim.Optimizer
    channels: Channels
    shards: Shards
    member: Endpoint
    chain: StateChain
    consensus: Consensus
    compact: CompactGradients | None
    service: ShardService | None
    state: KeptState
    residuals: Residuals | None
    join_coordinator: JoinCoordinator | None
    outer: OuterWeights | None
    check: ReplicaCheck | None

    @property
    def exchanges(self) -> tuple[Channel, ...]:
        return self.channels.all

    @property
    def partial(self) -> GossipChannel | None:
        return self.channels.partial

    @property
    def flat(self) -> FlatWeights | None:
        """The weights to which peers add, where they do."""
        weights = None if self.partial is None else self.partial.weights
        return weights if isinstance(weights, FlatWeights) else None

    @property
    def link_exchanges(self) -> tuple[RoundChannel, ...]:
        return () if self.channels.links is None else (self.channels.links,)

    @property
    def loop(self) -> LoopOptimizer | None:
        """The optimizer that replaces the user's in the loop, where the user's does not run
        here."""
        return self.optimizer if isinstance(self.optimizer, LoopOptimizer) else None

    @property
    def needs_store(self) -> bool:
        """Whether the rendezvous store is used during training."""
        collective = self.channels.collective
        on_gpu = collective is not None and collective.collectives.device.type == "cuda"
        return self.plan.partial_exchange is not None or on_gpu

    @property
    def round(self) -> int:
        """The open round, as far as this worker knows, where rounds can be missed."""
        return 0 if self.channels.rounds is None else self.channels.rounds.told_round

    def open_round(self) -> int:
        """The round that this worker makes next; waits until it is known."""
        return 0 if self.channels.rounds is None else self.channels.rounds.open_round()

    def bytes(self) -> tuple[Counter[str], Counter[str]]:
        """Payload sent and received, by scheme."""
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()
        for exchange in self.exchanges:
            sent += exchange.sent
            received += exchange.received
        return sent, received

    def retire(self) -> None:
        """This worker makes no more rounds; where another one speaks for it, that one says so."""
        worker = self.plan.cluster.worker(self.member.name)
        if worker >= 0:
            self.shards.retire(worker, self.member)

    def close(self) -> None:
        if isinstance(self.optimizer, RemoteOptimizer):
            self.optimizer.keeper = None
        if self.check is not None:
            self.check.close()
        if self.residuals is not None:
            self.residuals.close()
        self.synchronizer.close()
        self.member.close()
        if self.channels.collective is not None:
            self.channels.collective.collectives.close()
        if self.channels.memory is not None:
            self.channels.memory.close()


class Wiring:
    """Creates one pair's parts one after the other, in the same order on all ranks.

    Args:
        loop: the optimizer that the loop uses for this pair since an earlier call, if it is not the
            user's own.
    """

    def __init__(
        self,
        pair: Pair,
        plan: Plan,
        inventory: Inventory,
        shared: SharedParts,
        loop: LoopOptimizer | None = None,
    ) -> None:
        self._model, self._optimizer = pair
        self._plan, self._inventory, self._loop = plan, inventory, loop
        self._membership = membership = shared.membership
        self._shards = shared.shards.for_pair(plan.cluster.servers)
        self._chain, self._consensus = shared.chain, shared.consensus
        self._member = shared.next_endpoint()
        self._transfer = Transfer(self._member) if self._member.pair else shared.transfer
        self._limit_s = membership.limits.wait_s
        self._finite = FiniteGradients(
            membership.env.nonfinite,
            membership.env.rank,
            self._is_first("nonfinite"),
        )
        results = self._model.results if isinstance(self._model, HeldTensors) else None
        self._slots = LiveTensors(plan, inventory, Staging(), self._finite, results)
        self._layers = compact_layers(self._model, plan, inventory)
        self._outer: OuterWeights | None = None

    def _key(self, what: str) -> str:
        """The name of a gathering of this pair."""
        return f"{what}/pair {self._member.pair}" if self._member.pair else what

    def _is_first(self, what: str) -> Callable[[], bool]:
        """Whether this worker is the first one of which this is asked; the first one warns."""
        return lambda: self._membership.gathering.is_first(self._key(what))

    def configure(self) -> Callable[[], None]:
        """Servers work out the plan; the result waits for them."""
        recipe = None
        if self._plan.update.user_at_holder:
            recipe = recipe_for(self._optimizer, self._inventory)
        return self._shards.configure(self._plan, self._membership, self._member, recipe)

    def finish(self) -> Replica:
        """Create everything else; all ranks have rank 0's weights."""
        channels = self._channels()
        if (outer := self._plan.update.outer_optimizer) is not None:
            self._outer = OuterWeights(self._inventory, outer, is_constant(self._model))
        joins, compact = self._join_coordinator(channels), self._compact(channels)
        averages, service = self._averages(), self._service()
        optimizer, applier = self._applier(channels, averages)
        synchronizer = Synchronizer(
            self._model, self._plan, self._inventory, self._slots, channels.all, applier
        )
        state = self._state(optimizer, averages, service)
        if isinstance(state, ServerState):
            keep_at_servers(optimizer, synchronizer.applier, state)
        if isinstance(state, OuterState) and state.servers is not None:
            assert isinstance(synchronizer.applier, OuterUpdates)
            synchronizer.applier.hand_loaded_weights = state.servers.take_loaded_weights
        if compact is not None:
            synchronizer.capture_compact(compact)
        return Replica(
            self._plan,
            synchronizer,
            optimizer,
            channels,
            self._shards,
            self._member,
            self._chain,
            self._consensus,
            compact,
            service,
            state,
            self._residuals(channels),
            joins,
            self._outer,
            self._check(synchronizer, optimizer),
        )

    # ---- channels

    def _channels(self) -> Channels:
        """One for each transport that the plan uses."""
        plan = self._plan
        if plan.cluster.members:
            return self._channels_of_host()
        collective = self._collective(None)
        if (rule := plan.partial_exchange) is not None:
            flat = FlatWeights(self._inventory, is_constant(self._model))
            slices = make_partial(rule, flat, self._membership)
            return Channels(collective, partial=slices)
        links = self._links(self._slots, self._slots.results) if plan.over_links() else None
        return Channels(collective, links=links)

    def _channels_of_host(self) -> Channels:
        """With two levels: one worker of a host has channels to other hosts, the rest to it."""
        plan, membership, member = self._plan, self._membership, self._member
        rank = membership.env.rank
        ranks = next(ranks for ranks in plan.cluster.members if rank in ranks)
        shapes = [unit.layer for unit in plan.units if unit.layer is not None]
        memory = meet(plan.specs, ranks, membership, f"host memory/{member.pair}", shapes)
        layers, add = HostLayers(plan, memory), None
        if not plan.update.holder_applies:  # it is gradients that come back
            add = LayerResults(plan.specs, self._inventory.tensors, self._slots.results).add
        if rank != ranks[0]:
            worker, limit_s = ranks.index(rank), self._limit_s
            follower = HostFollower(worker, memory, self._slots, member, limit_s, layers, add)
            return Channels(host=follower, memory=memory)
        share = plan.cluster.ranks / plan.cluster.workers
        # Collectives add up what the host has divided by all: it is rounded once, in few bits, too.
        divisors = dict.fromkeys(self._summed(), float(plan.cluster.ranks))
        slots = HostSlots(memory, self._slots, share, divisors, add)
        gradients = HostGradients(slots)
        collective = self._collective(gradients)
        links = self._links(slots, gradients) if plan.over_links() else None
        of_layers = None
        if links is not None:
            links.weight, slots.is_whole = slots.weight, links.has_result
            of_layers = (layers, links)
        between = Channels(collective, links=links)
        rounds = links if plan.counts_rounds else None
        host = HostLeader(slots, between.all, member, self._limit_s, of_layers, rounds)
        if links is not None:
            host.settings = lambda: links.settings()
        return replace(between, host=host, memory=memory)

    def _collective(self, of_host: HostGradients | None) -> CollectiveChannel | None:
        plan, tensors = self._plan, self._inventory.tensors
        if not self._summed():
            return None
        device = collective_device(self._inventory) if of_host is None else torch.device("cpu")
        group = collectives_for(plan.cluster, device, self._membership, self._key("collectives"))
        if of_host is None:
            return CollectiveChannel(plan, tensors, self._slots, group, self._member)
        exchanged = HostExchange(of_host, self._finite)
        return CollectiveChannel(plan, tensors, exchanged, group, self._member, divisor=1)

    def _summed(self) -> list[int]:
        """The tensors that collectives sum."""
        routes = (self._plan.routes[route] for route in self._plan.route_of)
        return [t for t, route in enumerate(routes) if isinstance(route.over, Collective)]

    def _links(self, slots: Slots, results: GradientPlaces) -> RoundChannel:
        modules = {layer.shape.name: layer.module for layer in self._layers}
        channel = round_channel(
            self._plan.cluster.worker(self._member.name),
            self._plan,
            self._member,
            slots,
            math=TorchLayerMath(self._inventory.tensors, modules, results),
            colocated=self._shards.colocated,
            limit_s=self._limit_s,
        )
        cluster, transport = self._plan.cluster, self._member.transport
        servers = [cluster.name(node) for node in cluster.server_nodes]
        elsewhere = [name for name in servers if name not in self._shards.colocated]
        links = LinkWatch(transport, elsewhere, self._plan.congested_below, time.monotonic)
        channel.congested, channel.rate = links.congested, RateShare(self._optimizer)
        return channel

    def _join_coordinator(self, channels: Channels) -> JoinCoordinator | None:
        if channels.partial is None:
            return None
        member = self._membership.member
        return accept_joiners(self._model, self._plan, channels.partial, self._chain, member)

    def _compact(self, channels: Channels) -> CompactGradients | None:
        links = channels.rounds
        if not self._layers or links is None:
            return None
        plan, chooser, choices = self._plan, self._plan.chooser, None
        if chooser is not None and plan.choices():
            speeds = measure_speeds(self._membership) if chooser.needs_speeds else None
            by_unit = {layer.unit: layer for layer in self._layers}
            choices = LayerChoices(
                plan,
                chooser.measured(speeds),
                links,
                channels.all,
                self._member,
                lambda: [by_unit[unit.index].expected_rows for unit in plan.choices()],
                limit_s=self._limit_s,
            )
        tensors = self._inventory.tensors
        replaced = self._slots.results is self._slots.contributions and not (
            plan.update.holder_applies
        )
        assigned = AssignedGradients(tensors, replaced=replaced)
        return CompactGradients(plan, self._layers, links, choices, tensors, self._finite, assigned)

    # ---- updates

    def _applier(
        self, channels: Channels, averages: Averages
    ) -> tuple[torch.optim.Optimizer, Callable[[Synchronizer], Applier]]:
        """The optimizer that the loop uses, and a function that makes the applier."""
        plan, own, links, slices = self._plan, self._optimizer, channels.links, channels.partial
        if self._outer is not None:
            digests = PostedDigests(self._membership, self._key("first step"))
            loaded = LoadedWeights(self._model, self._outer, digests)
            return own, partial(
                OuterUpdates, optimizer=own, outer=self._outer, loaded=loaded, links=links
            )
        if plan.update.holder_applies:
            sender = links or channels.rounds  # a worker whose host another one speaks for has none
            assert sender is not None
            remote = self._loop or RemoteOptimizer(own, self._inventory.trained)
            assert isinstance(remote, RemoteOptimizer)
            is_first = self._is_first("overlap")
            return remote, partial(ServerUpdates, loop=remote, sender=sender, is_first=is_first)
        if plan.runs_ahead:
            assert isinstance(links, UpdateStream)
            loop = self._loop or LoopOptimizer(own)
            return loop, partial(
                StreamedUpdates,
                loop=loop,
                stream=links,
                averages=averages,
                is_first=self._is_first("overlap"),
            )
        if slices is not None:
            assert isinstance(slices.weights, FlatWeights)
            loop = self._loop or LoopOptimizer(own, slices.weights.still)
            written = WrittenWarning(slices.weights.written, self._is_first("written"))
            return loop, partial(
                PartialUpdates,
                loop=loop,
                channel=slices,
                averages=averages,
                written=written,
            )
        return own, partial(WorkerUpdates, optimizer=own, averages=averages)

    def _averages(self) -> Averages:
        """None are kept here where holders update, since they average."""
        update = self._plan.update
        average = None if update.holder_applies else update.average
        return Averages(self._model, average, self._inventory.parameter_names)

    # ---- servers

    def _service(self) -> ShardService | None:
        """Where servers update, they deal batches and keep accounts; they also keep accounts where
        workers may be lost."""
        servers = self._plan.cluster.servers
        wanted = self._plan.update.holder_applies or self._plan.consistency.goes_on
        return ShardService(servers, self._member, self._limit_s) if servers and wanted else None

    def _state(
        self,
        optimizer: torch.optim.Optimizer,
        averages: Averages,
        service: ShardService | None,
    ) -> KeptState:
        own, servers = StateAtWorker(self._model, optimizer, averages), None
        if self._plan.update.holder_applies and service is not None:
            limit_s = self._limit_s
            servers = ServerState(
                self._plan, self._inventory, optimizer, self._transfer, service, limit_s
            )
            servers.begin()
        if self._outer is not None:
            return OuterState(own, self._outer, self._slots.known_buffers, servers)
        return own if servers is None else servers

    def _check(
        self, synchronizer: Synchronizer, optimizer: torch.optim.Optimizer
    ) -> ReplicaCheck | None:
        if not keeps_replicas_equal(self._plan) or isinstance(self._model, HeldTensors):
            return None
        own = optimizer if optimizer is self._optimizer else None
        applier = synchronizer.applier
        handed = applier.handed if isinstance(applier, ServerUpdates) else {}
        return ReplicaCheck(synchronizer, own, optimizer, self._member, handed)

    def _residuals(self, channels: Channels) -> Residuals | None:
        if self._plan.update.holder_applies or channels.links is None:
            return None
        return Residuals(self._plan, channels.links, self._transfer, self._limit_s)


def recipe_for(optimizer: torch.optim.Optimizer, inventory: Inventory) -> OptimizerRecipe:
    """Describe the user's optimizer to the servers, which run it."""
    groups = groups_of(optimizer)
    return OptimizerRecipe(
        type(optimizer).__name__,
        settings_of(optimizer),
        [groups.get(id(tensor), -1) for tensor in inventory.tensors],
    )


def compact_layers(model: nn.Module, plan: Plan, inventory: Inventory) -> list[CompactLayer]:
    """In forward order, like the plan's tensors."""
    place_of = {id(tensor): i for i, tensor in enumerate(inventory.tensors)}
    units = {unit.layer.name: unit.index for unit in plan.units if unit.layer is not None}
    return [
        CompactLayer.of(name, module, form, place_of, units[name])
        for name, module, form, _ in named_forms(model)
        if name in units
    ]
