"""Starting a job's servers, telling them the plan, and knowing which stands beside whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.errors import ConfigError, FrameRefused, TooManyServers
from slipstream.runtime.configuration import Configuration, OptimizerRecipe
from slipstream.runtime.joining import Membership
from slipstream.runtime.member import HUB, Member
from slipstream.runtime.processes import ServerProcess, start_server
from slipstream.runtime.supervision import signal_name
from slipstream.strategy import Plan, Strategy
from slipstream.transports.wire import Configure, Message, Ready, Retire
from slipstream.types import Cluster, Spec

LAST = 1 << 30  # less urgent than any chunk


def choose_cluster(strategy: Strategy, specs: tuple[Spec, ...], membership: Membership) -> Cluster:
    """As many servers as were asked for; else one a host, or fewer for a small model."""
    env = membership.env
    dedicated = bool(env.server_addresses)
    asked = len(env.server_addresses) or env.servers
    wanted = Cluster(env.world_size, asked or 1, dedicated)
    if not strategy.needs_servers(specs, wanted):
        return Cluster(env.world_size)
    if asked:
        return wanted
    for servers in range(len(membership.first_on_each_host), 1, -1):
        try:
            strategy.plan(specs, Cluster(env.world_size, servers))
        except TooManyServers:
            continue
        return Cluster(env.world_size, servers)
    return Cluster(env.world_size, 1)


@dataclass(slots=True)
class Shards:
    """The servers of a job, as one worker sees them."""

    addresses: tuple[str, ...] = ()
    beside: frozenset[str] = frozenset()
    own: list[ServerProcess] = field(default_factory=list)

    def start(self, plan: Plan, membership: Membership) -> None:
        """Start this worker's share of the servers and link to all of them."""
        env, gathering = membership.env, membership.gathering
        count = plan.cluster.servers
        if not count:
            return  # dedicated ones, if there are any, are not needed by this strategy
        if env.server_addresses:
            self.addresses = env.server_addresses
        else:
            starters = membership.first_on_each_host
            mine = [k for k in range(count) if starters[k % len(starters)] == env.rank]
            self._start_own(mine, membership)
            self.addresses = tuple(
                gathering.read(f"server/{k}", starters[k % len(starters)], str)
                for k in range(count)
            )
            self.beside = frozenset(f"server {k}" for k in mine)
        for name, address in zip(self.names, self.addresses, strict=True):
            membership.transport.connect(name, address)
        membership.member.bind(self._processes(membership))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"server {k}" for k in range(len(self.addresses)))

    def _processes(self, membership: Membership) -> dict[str, int]:
        return {name: membership.run.credentials.process_of(name) for name in self.names}

    def _start_own(self, mine: list[int], membership: Membership) -> None:
        for k in mine:
            server = start_server(
                index=k,
                credentials=membership.run.credentials,
                bind=membership.host,
                timeout_s=membership.limits.start_s,
            )
            self.own.append(server)
            membership.gathering.post(f"server/{k}", server.address)
        self._watch_own(membership.member)

    def _watch_own(self, member: Member) -> None:
        """A server that is killed has no last words, and may not be expected to beat yet."""

        def look() -> None:
            for server in self.own:
                code = server.process.poll()
                if code is not None and code < 0:
                    member.report(server.name, f"was killed by {signal_name(-code)}")

        if self.own:
            member.on_tick(look)

    def configure(
        self, plan: Plan, membership: Membership, optimizer: OptimizerRecipe | None
    ) -> None:
        """Rank 0 tells every server the plan and waits until all have understood it."""
        member = membership.member
        if member.name != HUB or not self.addresses:
            return
        answers: dict[str, str | None] = {}
        names = self.names

        def on_ready(message: Message) -> None:
            assert isinstance(message.body, Ready)
            if message.sender not in names:
                raise FrameRefused(f"{message.sender} is no server")
            # At once: a server that is ready waits for beats while others still start.
            member.expect(message.sender)
            with member.changed:
                answers[message.sender] = message.body.reason
                member.changed.notify_all()

        member.on(Ready, on_ready)
        everybody = {f"rank {rank}": address for rank, address in enumerate(membership.addresses)}
        everybody |= dict(zip(names, self.addresses, strict=True))
        processes = {f"rank {rank}": number for rank, number in enumerate(membership.run.processes)}
        processes |= self._processes(membership)
        silence_s = member.roster.worker_silence_s or membership.limits.silence_s
        content = Configuration.of(plan, everybody, processes, silence_s, optimizer).encode()
        for name in names:
            member.send(name, Configure(), [content])
        member.wait_until(
            lambda: len(answers) == len(names),
            what="the servers to take the plan",
            limit_s=membership.limits.start_s,
            missing=lambda: [name for name in names if name not in answers],
        )
        for name, reason in answers.items():
            if reason is not None:
                raise ConfigError(f"{name} refused the plan: {reason}")

    def retire(self, rank: int, member: Member) -> None:
        """Tell servers that a worker makes no more rounds; after all that it has pushed."""
        for k in range(len(self.addresses)):
            member.send(f"server {k}", Retire(rank), priority=LAST)

    def close(self) -> None:
        for server in self.own:
            server.close()
