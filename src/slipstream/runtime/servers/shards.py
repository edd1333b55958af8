"""The servers of a job: their start, their plan, and which of them run on this host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.errors import ConfigError, FrameRefused, TooManyServers
from slipstream.plan import Plan
from slipstream.runtime.launch.processes import ServerProcess, start_server
from slipstream.runtime.launch.supervision import signal_name
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.members.joining import Membership
from slipstream.runtime.members.member import HUB, Member
from slipstream.runtime.process.event_log import log_event
from slipstream.runtime.servers.configuration import Configuration
from slipstream.strategy import Strategy
from slipstream.transports.wire import Configure, Message, Ready, Release, WorkerLeft
from slipstream.types import Cluster, OptimizerRecipe, Rank, Spec

logger = logging.getLogger(__name__)
Hosts = tuple[tuple[Rank, ...], ...]
LAST = 1 << 30  # less urgent than any chunk


def choose_clusters(
    strategy: Strategy,
    specs: Sequence[tuple[Spec, ...]],
    membership: Membership,
    running: int,
    hosts: Hosts = (),
) -> list[Cluster]:
    """Choose the servers of each pair; all pairs use the same servers.

    Args:
        specs: The tensors, by pair.
        running: The number of servers that already run; 0 before any was started.
        hosts: The ranks of each host, if hosts are the workers of the cluster.

    Returns:
        By pair, the cluster with the servers that it uses: fewer if its model is small.

    Raises:
        TooManyServers: No model is large enough for the requested servers.
    """
    env = membership.env
    requested = len(env.server_addresses) or env.servers
    most = running or requested or len(membership.first_on_each_host)
    clusters = [largest_cluster(strategy, each, membership, most, hosts) for each in specs]
    used = max(cluster.servers for cluster in clusters)
    if requested and not running and 0 < used < requested:
        largest = max(specs, key=lambda each: sum(spec.numel for spec in each))
        strategy.plan(largest, cluster_of(membership, hosts, requested))
    return clusters


def largest_cluster(
    strategy: Strategy, specs: tuple[Spec, ...], membership: Membership, most: int, hosts: Hosts
) -> Cluster:
    """Return the cluster with as many servers as the model can fill, at most ``most``."""
    for servers in range(most, 0, -1):
        cluster = cluster_of(membership, hosts, servers)
        if not strategy.needs_servers(specs, cluster):
            return cluster_of(membership, hosts)
        try:
            strategy.plan(specs, cluster)
        except TooManyServers:
            if servers > 1:
                continue
        return cluster
    return cluster_of(membership, hosts)


def cluster_of(membership: Membership, hosts: Hosts, servers: int = 0) -> Cluster:
    """Return the cluster of a job's workers, or its hosts, with so many servers."""
    env = membership.env
    workers = len(hosts) or env.world_size
    return Cluster(workers, servers, bool(servers and env.server_addresses), hosts)


@dataclass(slots=True)
class Shards:
    """One worker's view of the job's servers."""

    addresses: tuple[str, ...] = ()
    colocated: frozenset[str] = frozenset()
    own: list[ServerProcess] = field(default_factory=list)

    def start(self, count: int, membership: Membership) -> None:
        """Start this worker's share of the servers and connect to all of them; once."""
        env, gathering = membership.env, membership.gathering
        if not count or self.addresses:
            return  # this strategy does not need servers
        if env.server_addresses:
            self.addresses = env.server_addresses
        else:
            starters = membership.first_on_each_host
            own_indices = [k for k in range(count) if starters[k % len(starters)] == env.rank]
            self._start_own(own_indices, membership)
            self.addresses = tuple(
                gathering.read(f"server/{k}", starters[k % len(starters)], str)
                for k in range(count)
            )
            self.colocated = frozenset(f"server {k}" for k in own_indices)
        for name, address in zip(self.names, self.addresses, strict=True):
            membership.transport.connect(name, address)
        membership.member.bind(self._processes(membership))

    def for_pair(self, count: int) -> Shards:
        """Return the first ``count`` servers, of one pair; closing these ends no process."""
        addresses = self.addresses[:count]
        names = {f"server {k}" for k in range(count)}
        return Shards(addresses, self.colocated & names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"server {k}" for k in range(len(self.addresses)))

    def _processes(self, membership: Membership) -> dict[str, int]:
        return {name: membership.run.credentials.process_of(name) for name in self.names}

    def _start_own(self, indices: list[int], membership: Membership) -> None:
        for k in indices:
            server = start_server(
                index=k,
                credentials=membership.run.credentials,
                bind=membership.host,
                timeout_s=membership.limits.start_s,
                parts=membership.env.parts,
            )
            self.own.append(server)
            membership.gathering.post(f"server/{k}", server.address)
        self._watch_own(membership.member)

    def _watch_own(self, member: Member) -> None:
        """Report a server that is killed: it sends no error, and may not be watched yet."""

        def tick() -> None:
            for server in self.own:
                code = server.process.poll()
                if code is not None and code < 0:
                    member.report(server.name, f"was killed by {signal_name(-code)}")

        if self.own:
            member.on_tick(tick)

    def configure(
        self,
        plan: Plan,
        membership: Membership,
        member: Endpoint,
        optimizer: OptimizerRecipe | None,
    ) -> Callable[[], None]:
        """Send every server the plan of a pair; on rank 0.

        Returns:
            A function that waits until all have accepted it, and raises ConfigError if one cannot.
        """
        names = self.names
        if member.name != HUB or not names:
            return lambda: None
        answers = self._collect_answers(membership.member, member)
        content = self._configuration(plan, membership, optimizer).encode()
        for name in names:
            member.send(name, Configure(), [content])

        def wait() -> None:
            member.wait_until(
                lambda: len(answers) == len(names),
                what="the servers to take the plan",
                limit_s=membership.limits.start_s,
                missing=lambda: [name for name in names if name not in answers],
            )
            for name, reason in answers.items():
                if reason is not None:
                    raise ConfigError(f"{name} refused the plan: {reason}")
            self._log_configured(plan, member)

        return wait

    def _log_configured(self, plan: Plan, member: Endpoint) -> None:
        for name, address in zip(self.names, self.addresses, strict=True):
            log_event(
                logger,
                "server_configured",
                member=name,
                address=address,
                pair=member.pair,
                updates=plan.update.holder_applies,
            )

    def _collect_answers(self, whole: Member, member: Endpoint) -> dict[str, str | None]:
        """Return why each server refuses the plan, or None; answers are added on arrival."""
        answers: dict[str, str | None] = {}

        def on_ready(message: Message[Ready]) -> None:
            if message.sender not in self.names:
                raise FrameRefused(f"{message.sender} is no server")
            # Send heartbeats at once: a server that is ready expects them while others still start.
            whole.expect(message.sender)
            with member.updating():
                answers[message.sender] = message.body.reason

        member.on(Ready, on_ready)
        return answers

    def _configuration(
        self, plan: Plan, membership: Membership, optimizer: OptimizerRecipe | None
    ) -> Configuration:
        addresses = {f"rank {rank}": address for rank, address in enumerate(membership.addresses)}
        addresses |= dict(zip(self.names, self.addresses, strict=True))
        processes = {f"rank {rank}": number for rank, number in enumerate(membership.run.processes)}
        processes |= self._processes(membership)
        silence_s = membership.member.roster.worker_silence_s or membership.limits.silence_s
        parts = membership.env.parts
        return Configuration.of(plan, addresses, processes, silence_s, optimizer, parts)

    def release(self, member: Endpoint) -> None:
        """Inform servers that a pair is no longer trained under this plan; on rank 0."""
        for name in self.names if member.name == HUB else ():
            member.send(name, Release())

    def retire(self, rank: int, member: Endpoint) -> None:
        """Inform servers that a worker makes no more rounds; after all its pushes."""
        for name in self.names:
            member.send(name, WorkerLeft(rank), priority=LAST)

    def close(self) -> None:
        for server in self.own:
            server.close()
