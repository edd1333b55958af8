"""The parts of which a training mode makes one pair's: channels, capture, state."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from slipstream.plan import Plan
from slipstream.routes import Collective
from slipstream.runtime.exchange.channel import Slots
from slipstream.runtime.exchange.choices import LayerChoices
from slipstream.runtime.exchange.consensus import Consensus
from slipstream.runtime.exchange.engine import Applier
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.exchange.send_context import SendContext
from slipstream.runtime.exchange.state_chain import StateChain
from slipstream.runtime.exchange.transfer import Transfer
from slipstream.runtime.hosts.follower import HostFollower
from slipstream.runtime.hosts.layers import HostLayers
from slipstream.runtime.hosts.leader import HostLeader, HostSlots
from slipstream.runtime.hosts.meeting import meet
from slipstream.runtime.members.collective_calls import CollectiveCalls
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.members.joining import Membership
from slipstream.runtime.members.link_watch import LinkWatch
from slipstream.runtime.servers.shard_service import ShardService
from slipstream.runtime.servers.shards import Shards
from slipstream.torch.capture.assigned_gradients import AssignedGradients
from slipstream.torch.capture.compact_gradients import CompactGradients
from slipstream.torch.capture.replica_check import ReplicaCheck
from slipstream.torch.capture.synchronizer import Synchronizer
from slipstream.torch.channels.channel_set import ChannelSet
from slipstream.torch.channels.collective_channel import (
    CollectiveChannel,
    collective_device,
    collectives_for,
)
from slipstream.torch.channels.host_gradients import HostExchange, HostGradients, LayerResults
from slipstream.torch.channels.speeds import measure_speeds
from slipstream.torch.checkpoints.kept_state import KeptState
from slipstream.torch.checkpoints.residuals import Residuals
from slipstream.torch.checkpoints.server_state import ServerState
from slipstream.torch.modes.pair_parts import PairParts
from slipstream.torch.optimizers.loop_optimizer import LoopOptimizer
from slipstream.torch.tensors.compact_layers import CompactLayer, named_forms
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.torch.tensors.inventory import Inventory
from slipstream.torch.tensors.layer_math import TorchLayerMath
from slipstream.torch.tensors.pairs import Pair
from slipstream.torch.tensors.rate_share import RateShare
from slipstream.torch.tensors.slots import GradientPlaces, LiveTensors
from slipstream.torch.tensors.staging import Staging
from slipstream.types import Settings


@dataclass(slots=True)
class SharedParts:
    """The parts that all pairs of a job share, on one worker.

    Attributes:
        shards: All servers.
        transfer: Moves state of the job, and of pair 0.
        chain: Copies rank 0's state to all ranks.
        consensus: Computes the mean of the first pair's weights.
        calls: The job's collective calls.
        wired: How many pairs were wired; the next one's messages carry this number.
        distributed: How often ``job.distribute`` was called.
    """

    membership: Membership
    shards: Shards
    transfer: Transfer
    chain: StateChain
    consensus: Consensus
    calls: CollectiveCalls
    wired: int = 0
    distributed: int = 0

    def key(self, what: str) -> str:
        """The name of a gathering, a new one in every call of ``job.distribute``."""
        return what if self.distributed == 1 else f"{what}/{self.distributed}"

    def next_endpoint(self) -> Endpoint:
        """The endpoint of the next pair."""
        self.wired += 1
        return self.membership.member.for_pair(self.wired - 1).owned()

    def close(self) -> None:
        self.shards.close()


class PairSetup:
    """Makes the parts of one pair, in the same order on all ranks.

    Args:
        pair: The user's own model and optimizer.
        plan: The decisions for its tensors.
        inventory: Its tensors.
        shared: The parts that all pairs share.
        loop: The optimizer that the loop uses for this pair since an earlier call, if it is not the
            user's own.
        results: Where results go, if another framework has the weights; else None.
    """

    def __init__(
        self,
        pair: Pair,
        plan: Plan,
        inventory: Inventory,
        shared: SharedParts,
        loop: LoopOptimizer | None = None,
        results: GradientPlaces | None = None,
    ) -> None:
        self.model, self.optimizer = pair
        self.plan, self.inventory, self.loop = plan, inventory, loop
        self.membership, self.chain = shared.membership, shared.chain
        self.shards = shared.shards.for_pair(plan.cluster.servers)
        self.member = shared.next_endpoint()
        self._transfer = Transfer(self.member) if self.member.pair else shared.transfer
        self.limit_s = shared.membership.limits.wait_s
        self._calls, self._has_weights = shared.calls, results is None
        env = shared.membership.env
        self._finite = FiniteGradients(env.nonfinite, env.rank, self.is_first("nonfinite"))
        self.slots = LiveTensors(plan, inventory, Staging(), self._finite, results)
        self._layers = compact_layers(self.model, plan, inventory)

    def key(self, what: str) -> str:
        """The name of a gathering of this pair."""
        return f"{what}/pair {self.member.pair}" if self.member.pair else what

    def is_first(self, what: str) -> Callable[[], bool]:
        """Return whether this worker is the first one of which this is asked; that one warns."""
        return lambda: self.membership.gathering.is_first(self.key(what))

    # ---- channels

    def channels(
        self,
        kind: Callable[..., RoundChannel] = RoundChannel,
        settings: Callable[[], Settings] | None = None,
    ) -> ChannelSet:
        """Make a channel for each transport that the plan uses.

        Args:
            kind: Makes the channel over links.
            settings: The optimizer's, which are sent with gradients; None unless servers update.
        """
        if self.plan.cluster.members:
            return self._between_hosts(kind, settings)
        links = None
        if self.plan.over_links():
            links = self._links(kind, self.slots, self.slots.results, SendContext(settings))
        return ChannelSet(self.collective(), links=links)

    def _between_hosts(
        self, kind: Callable[..., RoundChannel], settings: Callable[[], Settings] | None
    ) -> ChannelSet:
        """With two levels: one worker of a host has channels to other hosts, the rest to it."""
        plan, membership, member, limit_s = self.plan, self.membership, self.member, self.limit_s
        rank = membership.env.rank
        ranks = next(ranks for ranks in plan.cluster.members if rank in ranks)
        shapes = [unit.layer for unit in plan.units if unit.layer is not None]
        memory = meet(plan.specs, ranks, membership, f"host memory/{member.pair}", shapes)
        layers, add = HostLayers(plan, memory), None
        if not plan.update.holder_applies:  # it is gradients that come back
            add = LayerResults(plan.specs, self.inventory.tensors, self.slots.results).add
        if rank != ranks[0]:
            worker = ranks.index(rank)
            follower = HostFollower(
                worker, memory, self.slots, member, limit_s, layers, add, settings
            )
            return ChannelSet(host=follower, memory=memory)
        share = plan.cluster.ranks / plan.cluster.workers
        # Collectives add up what the host has divided by all: it is rounded once, in few bits, too.
        divisors = dict.fromkeys(self._summed(), float(plan.cluster.ranks))
        slots = HostSlots(
            memory, self.slots, share, divisors, add, lambda t: links is None or links.has_result(t)
        )
        gradients = HostGradients(slots)
        links = None
        if plan.over_links():
            context = SendContext(settings, weight=slots.weight)
            links = self._links(kind, slots, gradients, context)
        between = ChannelSet(self.collective(gradients), links=links)
        host = HostLeader(
            slots,
            between.all,
            member,
            limit_s,
            None if links is None else (layers, links),
            links if plan.counts_rounds else None,
            settings,
        )
        return replace(between, host=host, memory=memory)

    def collective(self, of_host: HostGradients | None = None) -> CollectiveChannel | None:
        """Make the channel of collectives; None if they sum nothing.

        Args:
            of_host: A host's gradients, where its workers aggregate first.
        """
        plan, tensors = self.plan, self.inventory.tensors
        if not self._summed():
            return None
        device = collective_device(self.inventory) if of_host is None else torch.device("cpu")
        group = collectives_for(plan.cluster, device, self.membership, self.key("collectives"))
        if of_host is None:
            return CollectiveChannel(plan, tensors, self.slots, group, self.member)
        exchanged = HostExchange(of_host, self._finite)
        return CollectiveChannel(plan, tensors, exchanged, group, self.member, divisor=1)

    def _summed(self) -> list[int]:
        """The tensors that collectives sum."""
        routes = (self.plan.routes[route] for route in self.plan.route_of)
        return [t for t, route in enumerate(routes) if isinstance(route.over, Collective)]

    def _links(
        self,
        kind: Callable[..., RoundChannel],
        slots: Slots,
        results: GradientPlaces,
        context: SendContext,
    ) -> RoundChannel:
        modules = {layer.shape.name: layer.module for layer in self._layers}
        cluster, transport = self.plan.cluster, self.member.transport
        servers = [cluster.name(node) for node in cluster.server_nodes]
        elsewhere = [name for name in servers if name not in self.shards.colocated]
        watch = LinkWatch(transport, elsewhere, self.plan.congested_below, time.monotonic)
        return kind(
            cluster.worker(self.member.name),
            self.plan,
            self.member,
            slots,
            math=TorchLayerMath(self.inventory.tensors, modules, results),
            colocated=self.shards.colocated,
            context=replace(context, rate=RateShare(self.optimizer), congested=watch.congested),
            limit_s=self.limit_s,
        )

    # ---- servers

    def service(self) -> ShardService:
        """Make what sends requests to servers."""
        return ShardService(self.plan.cluster.servers, self.member, self.limit_s)

    def accounting(self) -> ShardService | None:
        """The same where workers update, and servers keep accounts: where workers may be lost."""
        wanted = self.plan.cluster.servers and self.plan.consistency.goes_on
        return self.service() if wanted else None

    def server_state(self, optimizer: torch.optim.Optimizer, service: ShardService) -> ServerState:
        """Make the access to the weights and state that servers have.

        Args:
            optimizer: The loop's.
        """

        meet = partial(self._calls.gather, "load_state_dict")
        return ServerState(
            self.plan, self.inventory, optimizer, self._transfer, service, self.limit_s, meet
        )

    # ---- the whole pair

    def parts(
        self,
        optimizer: torch.optim.Optimizer,
        channels: ChannelSet,
        applier: Callable[[Synchronizer], Applier],
        state: KeptState,
        service: ShardService | None,
        check: Callable[[Synchronizer], ReplicaCheck] | None = None,
    ) -> PairParts:
        """Capture gradients, drive these channels with them, and put everything together.

        Args:
            optimizer: The loop's.
            applier: Decides when results are awaited, and applies them.
            check: Makes what compares replicas, where they are equal after each step.
        """
        plan, compact = self.plan, self._compact(channels)
        synchronizer = Synchronizer(
            self.model, plan, self.inventory, self.slots, channels.all, applier, compact
        )
        residuals = None
        if channels.links is not None and not plan.update.holder_applies:
            residuals = Residuals(plan, channels.links, self._transfer, self.limit_s)
        return PairParts(
            plan=plan,
            model=self.model,
            optimizer=optimizer,
            synchronizer=synchronizer,
            channels=channels,
            shards=self.shards,
            member=self.member,
            compact=compact,
            service=service,
            state=state,
            residuals=residuals,
            check=check(synchronizer) if check is not None and self._has_weights else None,
        )

    def _compact(self, channels: ChannelSet) -> CompactGradients | None:
        rounds = channels.rounds
        if not self._layers or rounds is None:
            return None
        plan, chooser, choices = self.plan, self.plan.chooser, None
        if chooser is not None and plan.choices():
            speeds = measure_speeds(self.membership) if chooser.needs_speeds else None
            by_unit = {layer.unit: layer for layer in self._layers}
            choices = LayerChoices(
                plan,
                chooser.measured(speeds),
                rounds,
                channels.all,
                self.member,
                lambda: [by_unit[unit.index].expected_rows for unit in plan.choices()],
                limit_s=self.limit_s,
            )
        tensors = self.inventory.tensors
        in_place = self.slots.results is self.slots.contributions
        assigned = AssignedGradients(tensors, replaced=in_place and not plan.update.holder_applies)
        return CompactGradients(
            plan, self._layers, rounds, choices, tensors, self._finite, assigned
        )


def compact_layers(model: nn.Module, plan: Plan, inventory: Inventory) -> list[CompactLayer]:
    """The layers that the plan sends in compact form, in forward order, like its tensors."""
    place_of = {id(tensor): i for i, tensor in enumerate(inventory.tensors)}
    units = {unit.layer.name: unit.index for unit in plan.units if unit.layer is not None}
    return [
        CompactLayer.of(name, module, form, place_of, units[name])
        for name, module, form, _ in named_forms(model)
        if name in units
    ]
