"""A server process: waits for its configuration, then serves until the job ends.

A job may train several pairs of a model and an optimizer. Rank 0 configures a server once for each
pair of which it holds a shard.

A worker starts it on its own host, or the launcher does. It ends when rank 0 dismisses it, when the
job fails, or when the process that started it has ended (its standard input closes).
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import FrameRefused, RuntimeFault, SlipstreamError
from slipstream.plan import Plan
from slipstream.runtime.exchange.aggregator import Aggregator, PublishMean
from slipstream.runtime.exchange.transfer import Transfer
from slipstream.runtime.launch.death_signal import death_signal
from slipstream.runtime.launch.processes import PARTS, PARTS_PATH
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.members.link_watch import LinkWatch
from slipstream.runtime.members.member import HUB, Member, internal_fault
from slipstream.runtime.process.environment import modules
from slipstream.runtime.servers.checkpoint_state import (
    ServerOptimizerState,
    ServerResiduals,
    StatefulUpdater,
)
from slipstream.runtime.servers.configuration import Configuration
from slipstream.runtime.servers.outer_shard import OuterShard
from slipstream.runtime.servers.round_coordinator import IDLE_S, RoundCoordinator
from slipstream.runtime.servers.senders import from_hub
from slipstream.runtime.servers.shard import Shard
from slipstream.transports.credentials import Credentials
from slipstream.transports.descriptors import raise_descriptor_limit
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import (
    Arrived,
    Commit,
    Configure,
    Early,
    Fetch,
    Inquire,
    Lease,
    Leave,
    Message,
    Push,
    Ready,
    Release,
    RouteUpdated,
    Serve,
    SnapshotDue,
    State,
    WorkerLeft,
)
from slipstream.transports.zmq import SERVER_SEND_BUFFER_BYTES, ZmqTransport
from slipstream.types import Node, OptimizerRecipe

NEEDS_CONFIGURATION: tuple[type[Any], ...] = (
    *(Push, Early, Arrived, Commit, Serve, WorkerLeft, RouteUpdated, Inquire),
    *(Lease, State, Fetch, SnapshotDue),
)


class Server:
    """A server before and after its configuration.

    Args:
        index: Its number among the servers.
        member: Its membership of the job.
        parts: The modules of the user's own parts that it may import; no configuration adds one.

    Attributes:
        shards: Its shards, by pair.
    """

    def __init__(self, index: int, member: Member, parts: Sequence[str] = ()) -> None:
        self.index = index
        self.member = member
        self._parts = parts
        self.shards: dict[int, Shard] = {}
        member.on_any_pair(Configure, self._on_configure)
        member.on_any_pair(Release, from_hub(self._on_release))
        for kind in NEEDS_CONFIGURATION:
            member.on(kind, self._refuse)
            member.on_any_pair(kind, self._refuse)

    @property
    def done(self) -> bool:
        return self.member.dismissed or self.member.fault is not None

    @property
    def shard(self) -> Shard | None:
        """Pair 0's shard, if it is configured."""
        return self.shards.get(0)

    def tick(self) -> None:
        """Do what is due at this time; call it every ``tick_every_s`` seconds."""
        for coordinator in self._coordinators:
            coordinator.tick()

    @property
    def tick_every_s(self) -> float:
        return min((each.tick_every_s for each in self._coordinators), default=IDLE_S)

    @property
    def _coordinators(self) -> list[RoundCoordinator]:
        shards = self.shards.values()
        return [shard.coordinator for shard in shards if shard.coordinator is not None]

    def _refuse(self, message: Message[Any]) -> None:
        """Refuse a message of a type for which the configuration sets no handler."""
        kind = type(message.body).__name__
        if message.pair not in self.shards:
            raise FrameRefused(f"{kind} before the plan is known")
        raise FrameRefused(f"{self.member.name} takes no {kind} under this plan")

    def _on_configure(self, message: Message[Configure]) -> None:
        pair = message.pair
        if message.sender != HUB or len(message.frames) != 1 or pair in self.shards:
            raise FrameRefused("only rank 0 configures a server, and once for each pair")
        configuration = Configuration.decode(message.frames[0])
        for name, address in configuration.addresses.items():
            self.member.transport.connect(name, address)
        self.member.bind(configuration.processes)
        self.member.roster.silence_s = configuration.silence_s
        endpoint = self.member.for_pair(pair)
        try:
            shard = self._shard(configuration.plan(self._parts), configuration.optimizer, endpoint)
            self.shards[pair] = shard
            endpoint.send(HUB, Ready())
        except Exception as error:  # any error: rank 0 waits for an answer
            kind = "" if isinstance(error, SlipstreamError) else f"{type(error).__name__}: "
            endpoint.send(HUB, Ready(f"{kind}{error}"[:2000]))
        # Not before: importing torch for an updater may take longer than the silence limit.
        self.member.expect(HUB)

    def _on_release(self, message: Message[Release]) -> None:
        """Delete a shard, as a later ``job.distribute`` trains the pair under another plan."""
        if self.shards.pop(message.pair, None) is None:
            raise FrameRefused(f"pair {message.pair} is not configured")
        endpoint = self.member.for_pair(message.pair)
        for kind in NEEDS_CONFIGURATION:  # the shard's handlers hold all of its memory
            endpoint.on(kind, self._refuse)

    def _shard(self, plan: Plan, optimizer: OptimizerRecipe | None, member: Endpoint) -> Shard:
        node = plan.cluster.server_nodes[self.index]
        updater, transfer = updater_of(plan, node, optimizer), Transfer(member)
        workers = [plan.cluster.name(worker) for worker in plan.cluster.worker_nodes]
        watch = LinkWatch(member.transport, workers, plan.congested_below, lambda: member.now)
        aggregator = Aggregator(node, plan, updater or PublishMean(), watch.congested)
        if updater is None:
            ServerResiduals(node, aggregator, transfer)
        else:
            ServerOptimizerState(node, updater, aggregator, transfer)
        coordinator = RoundCoordinator(plan, transfer) if self.index == 0 else None
        return Shard(node, aggregator, member, coordinator)


def updater_of(plan: Plan, node: Node, recipe: OptimizerRecipe | None) -> StatefulUpdater | None:
    """Return the optimizer that updates weights here; None if workers update."""
    outer = plan.update.outer_optimizer
    if outer is not None and outer.at == "server":
        return OuterShard(plan, node, outer)
    if recipe is None:
        return None
    # Imported here, because it imports torch: a server that only averages starts without it.
    from slipstream.torch.optimizers.shard_optimizer import ShardOptimizer

    return ShardOptimizer(plan, node, recipe)


def serve(env: Mapping[str, str]) -> int:
    """Run one server from its environment; see ``processes.start_server``."""
    transport = transport_from(env)
    member = Member(transport.name, transport)
    member.on_tick(transport.guard.tick)
    server = Server(int(env["SLIPSTREAM_SERVER_INDEX"]), member, allowed_parts(env))
    print(json.dumps({"address": transport.address}), flush=True)
    os.dup2(2, 1)  # nothing else may be printed after the address
    while not server.done and not abandoned():
        try:
            member.pump_once(server.tick_every_s)
            server.tick()
        except RuntimeFault as fault:
            end_job(member, fault)
        except Exception as error:  # any error: report it, so that no member waits
            end_job(member, internal_fault(error))
    member.stop()
    return 0 if member.fault is None else 1


def allowed_parts(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules of the user's own parts that the process that started this one has named.

    They are looked for where that process looks, after everything else, so that a file in the
    folder of the user's script replaces no module here.
    """
    names = modules(env.get(PARTS, ""), PARTS)
    if names:
        places = env.get(PARTS_PATH, "").split(os.pathsep)
        sys.path += [place for place in places if place and place not in sys.path]
    return names


def transport_from(env: Mapping[str, str]) -> ZmqTransport:
    name = f"server {int(env['SLIPSTREAM_SERVER_INDEX'])}"
    encrypt = env.get("SLIPSTREAM_ENCRYPT", "1") != "0"
    credentials = Credentials(bytes.fromhex(env["SLIPSTREAM_RUN_KEY"]), encrypt)
    return ZmqTransport(
        name,
        host=env["SLIPSTREAM_BIND"],
        credentials=credentials,
        process=credentials.process_of(name),
        send_buffer_bytes=SERVER_SEND_BUFFER_BYTES,
    )


def end_job(member: Member, fault: RuntimeFault) -> None:
    member.send(HUB, Leave(str(fault)), priority=CONTROL)
    member.fail(fault)


def abandoned() -> bool:
    """Return whether the process that started this one has closed its end of standard input."""
    readable, _, _ = select.select([0], [], [], 0)
    return bool(readable) and not os.read(0, 4096)


if __name__ == "__main__":
    if arm := death_signal(int(os.environ.get("SLIPSTREAM_STARTED_BY", os.getppid()))):
        arm()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_descriptor_limit()
    code = serve(os.environ)
    sys.stderr.flush()
    # Everything is closed. Unloading torch takes most of a second, for which the worker that waits
    # for this process would wait too.
    os._exit(code)
