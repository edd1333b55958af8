"""A server process: one shard's holder behind a transport, until the job ends.

Started by a worker beside itself or by the launcher; ends when rank 0 dismisses it, when the job
fails, or when whoever started it is gone (its standard input closes).
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.errors import FrameRefused, RuntimeFault, SlipstreamError
from slipstream.runtime.configuration import Configuration
from slipstream.runtime.exchange import rank_of
from slipstream.runtime.factor_holder import FactorHolder
from slipstream.runtime.holder import Holder, PublishMean, Result, Updater
from slipstream.runtime.member import HUB, Handler, Member
from slipstream.strategy import Plan
from slipstream.transports.credentials import Credentials
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import (
    Compact,
    Configure,
    Fetch,
    Leave,
    Load,
    Message,
    Push,
    Ready,
    State,
)
from slipstream.transports.zmq import SERVER_SEND_BUFFER_BYTES, ZmqTransport
from slipstream.types import Node


class Server:
    """One shard."""

    def __init__(self, index: int, member: Member) -> None:
        self.index = index
        self.member = member
        self._holder: Holder | None = None
        self._factors: FactorHolder | None = None
        member.on(Configure, self._on_configure)
        member.on(Push, self._on_push)
        member.on(Compact, self._on_compact)

    @property
    def done(self) -> bool:
        return self.member.dismissed or self.member.fault is not None

    def _on_configure(self, message: Message) -> None:
        if message.sender != HUB or len(message.frames) != 1 or self._holder is not None:
            raise FrameRefused("only rank 0 configures a server, and once")
        configuration = Configuration.decode(message.frames[0])
        for name, address in configuration.addresses.items():
            self.member.transport.connect(name, address)
        self.member.roster.silence_s = configuration.silence_s
        try:
            plan = configuration.plan()
            node = plan.cluster.server_nodes[self.index]
            self._holder = Holder(node, plan, self._updater(configuration, plan, node))
            self._factors = FactorHolder(node, plan)
            self.member.send(HUB, Ready())
        except Exception as error:  # whatever it is, rank 0 should not wait for it in vain
            kind = "" if isinstance(error, SlipstreamError) else f"{type(error).__name__}: "
            self.member.send(HUB, Ready(f"{kind}{error}"[:2000]))
        # Not before: an updater imports torch, which may take longer than a silence may last.
        self.member.expect(HUB)

    def _updater(self, configuration: Configuration, plan: Plan, node: Node) -> Updater:
        if configuration.optimizer is None:
            return PublishMean()
        # torch is imported only by servers that need it: without, a server starts at once.
        from slipstream.torch.shard_optimizer import ShardOptimizer

        shard = ShardOptimizer(plan, node, configuration.optimizer)
        self.member.on(Load, from_hub(shard.load))
        self.member.on(State, from_hub(shard.load_state))
        self.member.on(Fetch, from_hub(lambda message: self._answer(*shard.fetch(message))))
        return shard

    def _answer(self, body: State, frames: list[bytes]) -> None:
        self.member.send(HUB, body, frames)

    def _on_push(self, message: Message) -> None:
        if self._holder is None:
            raise FrameRefused("a push before the plan is known")
        assert isinstance(message.body, Push)
        body, frames = message.body, message.frames
        self._publish(self._holder.plan, self._holder.push, rank_of(message.sender), body, frames)

    def _on_compact(self, message: Message) -> None:
        if self._holder is None or self._factors is None:
            raise FrameRefused("factors before the plan is known")
        assert isinstance(message.body, Compact)
        body, frames = message.body, message.frames
        self._publish(self._holder.plan, self._factors.push, rank_of(message.sender), body, frames)

    def _publish(
        self, plan: Plan, push: Callable[..., list[Result]], rank: int, body: Any, frames: Any
    ) -> None:
        """Take a contribution and send out the results of what it closes."""
        try:
            results = push(rank, body, frames)
        except FrameRefused:
            raise
        except RuntimeFault as fault:
            self.member.send(HUB, Leave(str(fault)), priority=CONTROL)
            raise
        node = plan.cluster.server_nodes[self.index]
        for result in results:
            chunk = plan.chunks[result.body.chunk]
            urgency = plan.priority(chunk)
            for target in plan.route(chunk).topology.fanout(node, plan.cluster):
                name = plan.cluster.name(target)
                self.member.send(name, result.body, result.frames, priority=urgency)


def from_hub(handler: Handler) -> Handler:
    """What only rank 0 may ask for: nobody else is sure to have a link back."""

    def handle(message: Message) -> None:
        if message.sender != HUB:
            raise FrameRefused(f"{type(message.body).__name__} from {message.sender}")
        handler(message)

    return handle


def serve(env: Mapping[str, str]) -> int:
    """Run one server from its environment; see ``processes.start_server``."""
    index = int(env["SLIPSTREAM_SERVER_INDEX"])
    host = env["SLIPSTREAM_BIND"]
    encrypt = env.get("SLIPSTREAM_ENCRYPT", "1") != "0"
    credentials = Credentials(env["SLIPSTREAM_SECRET"].encode(), env["SLIPSTREAM_JOB"], encrypt)
    transport = ZmqTransport(
        f"server {index}",
        host=host,
        credentials=credentials,
        send_buffer_bytes=SERVER_SEND_BUFFER_BYTES,
    )
    member = Member(transport.name, transport)
    server = Server(index, member)
    print(json.dumps({"address": transport.address}), flush=True)
    os.dup2(2, 1)  # nothing else may follow the address
    while not server.done and not abandoned():
        try:
            member.pump_once(0.25)
        except RuntimeFault as fault:
            member.fail(fault)
    member.stop()
    return 0 if member.fault is None else 1


def abandoned() -> bool:
    """Whether whoever started this process has let go of its standard input."""
    readable, _, _ = select.select([0], [], [], 0)
    return bool(readable) and not os.read(0, 4096)


def allow_many_connections() -> None:
    """Strangers may open connections until they are cut; they must not use up all descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    allow_many_connections()
    sys.exit(serve(os.environ))
