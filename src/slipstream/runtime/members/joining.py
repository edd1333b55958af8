"""Joining a job: from an environment to a running heartbeat and the addresses of all ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.errors import LaunchError, WaitLimit
from slipstream.runtime.members.gathering import URGENT, Gathering
from slipstream.runtime.members.member import HUB, Member
from slipstream.runtime.members.rendezvous import Rendezvous, Run
from slipstream.runtime.members.store import await_name, default_group_store
from slipstream.runtime.process.environment import Environment
from slipstream.transports.wire import Rejoin
from slipstream.transports.zmq import ZmqTransport


@dataclass(frozen=True, slots=True)
class Limits:
    """The time limits of a job; every wait has one of these."""

    start_s: float
    wait_s: float
    silence_s: float


@dataclass(frozen=True, slots=True)
class Membership:
    """A worker's connection to a job of several processes."""

    env: Environment
    limits: Limits
    host: str
    rendezvous: Rendezvous
    run: Run
    transport: ZmqTransport
    member: Member
    gathering: Gathering
    addresses: tuple[str, ...]  # by rank

    def close_store(self) -> None:
        """Close the rendezvous store; another job may then use its port."""
        self.transport.guard.store_port = None
        self.rendezvous.close()

    def finish_training(self) -> bool:
        """Wait until no worker trains any more; return whether no worker was lost."""
        return self.member.exit_barrier.finish_training(
            self.env.rank, self.env.world_size, self.limits.wait_s
        )

    def leave(self, summary: bytes) -> list[bytes]:
        """Leave after a normal end; on rank 0 return the metrics of ranks 1 to n-1."""
        return self.member.exit_barrier.leave(
            summary, self.env.world_size, self.limits.wait_s, before_dismissal=self.close_store
        )

    @property
    def first_on_each_host(self) -> tuple[int, ...]:
        """The lowest rank on each host, in rank order."""
        hosts: dict[str, int] = {}
        for rank, address in enumerate(self.addresses):
            hosts.setdefault(address.rpartition(":")[0], rank)
        return tuple(hosts.values())


def join(env: Environment, limits: Limits, store: Any = None) -> Membership:
    """Find the other ranks, connect to them, and start the heartbeat.

    Args:
        store: Rank 0's store, if it is open already.
    """
    if default_group_store(env) is not None:
        env = replace(env, agent_store=True)  # torch's store may listen on every address
    env = env.with_secret()
    await_name(env, limits.start_s)
    host = env.listen_host()
    try:
        return _join(env, limits, host, store)
    except WaitLimit as late:
        raise LaunchError(str(late), missing=late.missing) from late


def _join(env: Environment, limits: Limits, host: str, store: Any) -> Membership:
    rendezvous = Rendezvous(env, limit_s=limits.start_s, store=store)
    run = rendezvous.meet()
    name = f"rank {env.rank}"
    transport = ZmqTransport(
        name, host=host, credentials=run.credentials, process=rendezvous.process
    )
    member = Member(name, transport, silence_s=limits.silence_s)
    gathering = Gathering(member, env.rank, env.world_size, limits.start_s)
    try:
        addresses = rendezvous.addresses(run, transport.address)
        _link(env, member, run, addresses)
        if env.launcher is not None:
            member.on_tick(lambda: end_with(env.launcher))
        member.on_tick(transport.guard.tick)
        member.start()
        # No rank continues before all ranks listen: otherwise a message could be lost.
        gathering.gather("joined", True, bool)
        if env.rank == 0 and not env.agent_store:
            transport.guard.store_port = env.master_port
    except BaseException:
        member.stop()
        rendezvous.close()
        raise
    return Membership(env, limits, host, rendezvous, run, transport, member, gathering, addresses)


def _link(env: Environment, member: Member, run: Run, addresses: Sequence[str]) -> None:
    """Connect to every rank, bind its name to its process, and expect heartbeats."""
    everybody = [f"rank {rank}" for rank in range(env.world_size)]
    # A restarted worker does not know which other workers were restarted; rank 0 never is.
    known = everybody[:1] if env.incarnation else everybody
    member.bind(dict(zip(known, run.processes, strict=False)))
    member.bind({member.name: member.transport.process})
    for name, address in zip(everybody, addresses, strict=True):
        if name != member.name:
            member.transport.connect(name, address)
    if env.incarnation:
        # Rank 0 does not expect this process yet, and does not know its address.
        member.send(HUB, Rejoin(member.transport.address, env.incarnation), priority=URGENT)
    else:
        member.expect(*(everybody if env.rank == 0 else (HUB,)))


def end_with(launcher: int | None) -> None:
    """End this process if its launcher has ended; Linux does this by itself."""
    if os.getppid() == 1 and launcher != 1:
        os._exit(1)
