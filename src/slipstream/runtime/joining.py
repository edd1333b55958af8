"""Becoming a member: from an environment to a running heartbeat and everybody's address."""

from __future__ import annotations

import os
from dataclasses import dataclass

from slipstream.errors import LaunchError, WaitLimit
from slipstream.runtime.environment import Environment
from slipstream.runtime.member import HUB, Member
from slipstream.runtime.rendezvous import Rendezvous
from slipstream.transports.zmq import ZmqTransport


@dataclass(frozen=True, slots=True)
class Limits:
    """How long anything may take; every wait has one of these."""

    start_s: float
    wait_s: float
    silence_s: float


@dataclass(frozen=True, slots=True)
class Membership:
    """What a worker has once it is part of a job of several."""

    env: Environment
    limits: Limits
    host: str
    rendezvous: Rendezvous
    transport: ZmqTransport
    member: Member
    addresses: tuple[str, ...]  # by rank

    @property
    def first_on_each_host(self) -> tuple[int, ...]:
        """The lowest rank on each host, in rank order."""
        hosts: dict[str, int] = {}
        for rank, address in enumerate(self.addresses):
            hosts.setdefault(address.rpartition(":")[0], rank)
        return tuple(hosts.values())


def join(env: Environment, limits: Limits) -> Membership:
    """Find the others, link to them, and start the heartbeat."""
    env.require_secret()
    host = env.listen_host()
    try:
        return _join(env, limits, host)
    except WaitLimit as late:
        raise LaunchError(str(late), missing=late.missing) from late


def _join(env: Environment, limits: Limits, host: str) -> Membership:
    rendezvous = Rendezvous(env, limit_s=limits.start_s)
    name = f"rank {env.rank}"
    transport = ZmqTransport(name, host=host, credentials=rendezvous.credentials)
    member = Member(name, transport, silence_s=limits.silence_s)
    try:
        # One that comes back finds what the others said in the beginning, and says its own again.
        addresses = rendezvous.gather("address", transport.address, str)
        for rank, address in enumerate(addresses):
            if rank != env.rank:
                transport.connect(f"rank {rank}", address)
        if not env.life:  # else rank 0 does not expect it yet, either
            everybody = tuple(f"rank {r}" for r in range(env.world_size))
            member.expect(*(everybody if env.rank == 0 else (HUB,)))
        member.start()
        rendezvous.watch(member.check)
        # Nobody goes on before everybody listens: a message to come must find its reader.
        rendezvous.gather("joined", True, bool)
    except BaseException:
        member.stop()
        raise
    if env.launcher is not None:
        member.idle = lambda: end_with(env.launcher)
    return Membership(env, limits, host, rendezvous, transport, member, tuple(addresses))


def end_with(launcher: int | None) -> None:
    """End this process when its launcher is gone; Linux does it by itself, others do not."""
    if os.getppid() == 1 and launcher != 1:
        os._exit(1)
