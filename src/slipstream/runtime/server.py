"""A server process: one shard's holder behind a transport, until the job ends.

Started by a worker beside itself or by the launcher; ends when rank 0 dismisses it, when the job
fails, or when whoever started it is gone (its standard input closes).
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from slipstream.consistency import Rounds
from slipstream.consistency.agreement import Agreement, Decision, Late
from slipstream.consistency.leases import Leases
from slipstream.errors import FrameRefused, RuntimeFault, SlipstreamError
from slipstream.planning.backups import Adapting
from slipstream.runtime.accounts import figures_of
from slipstream.runtime.configuration import Configuration
from slipstream.runtime.exchange import rank_of
from slipstream.runtime.factor_holder import FactorHolder
from slipstream.runtime.holder import Holder, PublishMean, Result, Updater
from slipstream.runtime.link_watch import LinkWatch
from slipstream.runtime.member import HUB, Handler, Member, internal_fault
from slipstream.strategy import Plan
from slipstream.topologies import Topology
from slipstream.transports.credentials import Credentials
from slipstream.transports.descriptors import raise_descriptor_limit
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import (
    Account,
    Arrived,
    Commit,
    Compact,
    Configure,
    Dump,
    Fetch,
    Inquire,
    Lease,
    Leased,
    Leave,
    Load,
    Message,
    Push,
    Ready,
    Rerouted,
    Retire,
    Serve,
    Snapshot,
    State,
    checksum,
)
from slipstream.transports.zmq import SERVER_SEND_BUFFER_BYTES, ZmqTransport
from slipstream.types import Node, Rank

DECIDING = "server 0"
IDLE_S = 0.25
ADAPTING = Adapting()


class Server:
    """One shard."""

    def __init__(self, index: int, member: Member) -> None:
        self.index = index
        self.member = member
        self.holder: Holder | None = None
        self._factors: FactorHolder | None = None
        self._agreement: Agreement | None = None
        self._leases: Leases | None = None
        self._gone: set[Rank] = set()
        self._lost: set[Rank] = set()
        self._rerouted: dict[Rank, set[Rank]] = {}  # by who was lost: who passes on without it
        self._topologies: list[Topology] = []
        member.on(Configure, self._on_configure)
        member.on(Push, self._on_push)
        member.on(Compact, self._on_compact)
        member.on(Arrived, self._on_arrived)
        member.on(Commit, self._on_commit)
        member.on(Serve, self._on_serve)
        member.on(Retire, self._on_retire)
        member.on(Rerouted, self._on_rerouted)
        member.on(Inquire, self._on_inquire)
        member.on(Snapshot, self._on_snapshot)
        member.on(Lease, self._on_lease)

    @property
    def done(self) -> bool:
        return self.member.dismissed or self.member.fault is not None

    def _on_configure(self, message: Message) -> None:
        if message.sender != HUB or len(message.frames) != 1 or self.holder is not None:
            raise FrameRefused("only rank 0 configures a server, and once")
        configuration = Configuration.decode(message.frames[0])
        for name, address in configuration.addresses.items():
            self.member.transport.connect(name, address)
        self.member.bind(configuration.processes)
        self.member.roster.silence_s = configuration.silence_s
        try:
            plan = configuration.plan()
            self._topologies = [route.topology for route in plan.routes]
            node = plan.cluster.server_nodes[self.index]
            self.holder = Holder(node, plan, self._updater(configuration, plan, node))
            workers = [plan.cluster.name(worker) for worker in plan.cluster.worker_nodes]
            transport, enough = self.member.transport, plan.narrow_below
            watch = LinkWatch(transport, workers, enough, lambda: self.member.now)
            self.holder.narrow = watch.narrow
            if configuration.optimizer is None:
                self.member.on(Fetch, self._on_fetch_memories)
                self.member.on(State, from_hub(self._on_memories))
            self._factors = FactorHolder(node, plan)
            if plan.consistency.agreed and self._decides:
                self._agreement = agreement_for(plan)
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
        self.member.on(Fetch, lambda message: self._answer(message, *shard.fetch(message)))
        self.member.on(Dump, lambda message: self._dump(message, shard))
        return shard

    @property
    def _decides(self) -> bool:
        return self.index == 0

    def _worker(self, message: Message) -> int:
        """The rank of a worker that may be answered."""
        rank = rank_of(message.sender)
        if self.holder is None or not 0 <= rank < self.holder.plan.cluster.workers:
            raise FrameRefused(f"{type(message.body).__name__} from {message.sender}")
        return rank

    def _answer(self, message: Message, body: State, frames: list[bytes]) -> None:
        self._worker(message)
        self.member.send(message.sender, body, frames)

    def _dump(self, message: Message, shard: Any) -> None:
        assert isinstance(message.body, Dump)
        holder, rank = self._told(message), message.body.rank
        if rank >= holder.plan.cluster.workers:
            raise FrameRefused(f"there is no rank {rank}")
        for chunk in holder.plan.held_by(holder.plan.cluster.server_nodes[self.index]):
            body, frames = shard.state(chunk.index)
            told = msgspec.structs.replace(body, round=holder.round(chunk))
            self.member.send(holder.plan.cluster.name(rank), told, frames)

    def _on_snapshot(self, message: Message) -> None:
        self._deciding()
        self._tell_servers(Dump(self._worker(message)))

    def _on_lease(self, message: Message) -> None:
        assert isinstance(message.body, Lease)
        rank = self._worker(message)
        if self._leases is None:
            self._leases = Leases(message.body.batches)
        if self._leases.batches != message.body.batches:
            raise FrameRefused(f"{message.body.batches} batches; others have another number")
        self._leases.give_back(rank, message.body.returned)
        batch = self._leases.lease(rank)
        self.member.send(message.sender, Leased(batch.epoch, batch.number))
        if self._agreement is None:
            self._leases.settle(rank, counts=True)  # every gradient does

    def _on_push(self, message: Message) -> None:
        if self.holder is None:
            raise FrameRefused("a push before the plan is known")
        assert isinstance(message.body, Push)
        body, frames = message.body, message.frames
        self._publish(self.holder.plan, self.holder.push, rank_of(message.sender), body, frames)
        for round_, rank in self.holder.whole():
            self.member.send(DECIDING, Arrived(rank, round_))

    # ---- what codecs remember, for checkpoints

    def _on_fetch_memories(self, message: Message) -> None:
        assert isinstance(message.body, Fetch)
        assert self.holder is not None
        self._worker(message)
        memories = [m for m in self.holder.memories(message.body.chunk) if m is not None]
        entries = [(segment, "residual", "float32") for segment in range(len(memories))]
        frames = [memory.tobytes() for memory in memories]
        body = State(message.body.chunk, entries, checksum(frames))
        self.member.send(message.sender, body, frames)

    def _on_memories(self, message: Message) -> None:
        assert isinstance(message.body, State)
        assert self.holder is not None
        memories = [m for m in self.holder.memories(message.body.chunk) if m is not None]
        sizes = [memory.nbytes for memory in memories]
        if [memoryview(frame).nbytes for frame in message.frames] != sizes:
            raise FrameRefused(f"residuals of chunk {message.body.chunk} have other sizes")
        if checksum(message.frames) != message.body.crc:
            raise FrameRefused(f"checksum of chunk {message.body.chunk}'s residuals does not match")
        for memory, frame in zip(memories, message.frames, strict=True):
            memory.view(np.uint8)[:] = np.frombuffer(frame, np.uint8)

    # ---- rounds that servers agree on

    def _on_arrived(self, message: Message) -> None:
        assert isinstance(message.body, Arrived)
        agreement, server = self._deciding(), server_of(message.sender)
        if not 0 <= server < agreement.holders:
            raise FrameRefused(f"{message.sender} is no server")
        body = message.body
        self._tell(agreement.arrived(server, body.rank, body.round, self.member.now))

    def _on_retire(self, message: Message) -> None:
        assert isinstance(message.body, Retire)
        rank, sender = message.body.rank, rank_of(message.sender)
        if self.holder is None or rank >= self.holder.plan.cluster.workers:
            raise FrameRefused(f"a farewell of rank {rank}")
        if sender != rank and message.sender != HUB:
            raise FrameRefused(f"{message.sender} does not speak for rank {rank}")
        if self.holder.plan.together and rank not in self._gone:
            self._lose(self.holder.plan, rank, lost=sender != rank)
        self._publish(self.holder.plan, self.holder.retire, rank)
        if self._agreement is not None:
            now, lost = self.member.now, sender != rank
            if self._leases is not None:
                self._leases.forfeit(rank, keeping=self._agreement.is_in(rank))
            self._tell(self._agreement.retire(rank, now, lost=lost))

    def _lose(self, plan: Plan, rank: Rank, *, lost: bool) -> None:
        """Until all know, results go to everybody directly, and so does what may have been lost."""
        self._gone.add(rank)
        if lost:
            self._lost.add(rank)
            self._topologies = [topology.without(rank) for topology in self._topologies]
            assert self.holder is not None
            for result in self.holder.replay():
                self._send_to(plan, result, self._here(plan))

    def _on_rerouted(self, message: Message) -> None:
        assert isinstance(message.body, Rerouted)
        rank, lost = self._worker(message), message.body.rank
        assert self.holder is not None
        if lost >= self.holder.plan.cluster.workers:
            raise FrameRefused(f"there is no rank {lost}")
        # It may come before rank 0's own word that this one is lost.
        self._rerouted.setdefault(lost, set()).add(rank)

    def look(self) -> None:
        """Close what is due because of the time."""
        if self._agreement is not None:
            self._tell(self._agreement.look(self.member.now))

    @property
    def looks_every_s(self) -> float:
        """How often that is worth while."""
        if self._agreement is None or self._agreement.rule.close_after_s is None:
            return IDLE_S
        return min(IDLE_S, self._agreement.rule.close_after_s / 20)

    def _deciding(self) -> Agreement:
        if self._agreement is None:
            raise FrameRefused(f"{self.member.name} does not decide on rounds")
        return self._agreement

    def _tell(self, decisions: Iterable[Decision]) -> None:
        """All servers hear all decisions in the same order: all as urgent as each other."""
        for decision in decisions:
            body: Commit | Serve
            if isinstance(decision, Late):
                body = Serve(decision.round, decision.rank)
            else:
                body = Commit(decision.round, list(decision.ranks))
            self._tell_servers(body)
            self._settle(decision)

    def _tell_servers(self, body: Commit | Serve | Dump) -> None:
        assert self.holder is not None
        cluster = self.holder.plan.cluster
        for node in cluster.server_nodes:
            self.member.send(cluster.name(node), body)

    def _settle(self, decision: Decision) -> None:
        if self._leases is None:
            return
        if isinstance(decision, Late):
            self._leases.settle(decision.rank, counts=False)
        else:
            for rank in decision.ranks:
                self._leases.settle(rank, counts=True)

    def _on_commit(self, message: Message) -> None:
        assert isinstance(message.body, Commit)
        holder, body = self._told(message), message.body
        self._send_out(holder.plan, holder.commit(body.round, body.ranks))

    def _on_serve(self, message: Message) -> None:
        assert isinstance(message.body, Serve)
        holder, body = self._told(message), message.body
        if body.rank >= holder.plan.cluster.workers:
            raise FrameRefused(f"there is no rank {body.rank}")
        self._send_out(holder.plan, holder.serve(body.round, body.rank))

    def _told(self, message: Message) -> Holder:
        if message.sender != DECIDING or self.holder is None:
            raise FrameRefused(f"a decision from {message.sender}")
        return self.holder

    def _on_inquire(self, message: Message) -> None:
        self._worker(message)
        assert self.holder is not None
        figures = msgspec.structs.replace(
            figures_of(self.holder, self._agreement),
            refused=self.member.refused,
            last_refusal=self.member.last_refusal,
        )
        self.member.send(message.sender, Account(), [msgspec.json.encode(figures)])

    # ---- factors

    def _on_compact(self, message: Message) -> None:
        if self.holder is None or self._factors is None:
            raise FrameRefused("factors before the plan is known")
        assert isinstance(message.body, Compact)
        body, frames = message.body, message.frames
        self._publish(self.holder.plan, self._factors.push, rank_of(message.sender), body, frames)

    def _publish(self, plan: Plan, change: Callable[..., list[Result]], *what: Any) -> None:
        """Take a contribution, or a farewell, and send out the results of what it closes."""
        try:
            results = change(*what)
        except FrameRefused:
            raise
        except RuntimeFault as fault:
            self.member.send(HUB, Leave(str(fault)), priority=CONTROL)
            raise
        self._send_out(plan, results)

    def _send_out(self, plan: Plan, results: Iterable[Result]) -> None:
        node = plan.cluster.server_nodes[self.index]
        for result in results:
            self._send_to(plan, result, self._audience(plan, node, result))

    def _send_to(self, plan: Plan, result: Result, targets: Iterable[Node]) -> None:
        urgency = plan.priority(plan.chunks[result.body.chunk])
        for target in targets:
            name = plan.cluster.name(target)
            self.member.send(name, result.body, result.frames, priority=urgency)

    def _here(self, plan: Plan) -> set[Rank]:
        return set(plan.cluster.worker_nodes) - self._gone

    def _audience(self, plan: Plan, node: Node, result: Result) -> Iterable[Node]:
        """Whom to send it to from here; others get it from them."""
        here = self._here(plan)
        if result.audience is not None and not here <= set(result.audience):
            return result.audience
        if any(here - self._rerouted.get(lost, set()) for lost in self._lost):
            return here
        topology = self._topologies[plan.chunks[result.body.chunk].route]
        return [to for to in topology.fanout(node, node, plan.cluster) if to in here]


def agreement_for(plan: Plan) -> Agreement:
    rule, cluster = plan.consistency, plan.cluster
    assert isinstance(rule, Rounds)
    holding = sum(bool(plan.held_by(node)) for node in cluster.server_nodes)
    agreement = Agreement(rule, cluster.workers, holding)
    if rule.adapts:
        agreement.reconsider = adapted
    return agreement


def adapted(agreement: Agreement) -> Rounds:
    """The rule with as many workers to a round as their steps so far make best."""
    rule, steps = agreement.rule, agreement.arrivals.durations
    here = {rank: steps[rank] for rank in agreement.members if rank in steps}
    first = ADAPTING.first_after(agreement.round, here, rule.first or agreement.workers)
    return replace(rule, first=max(first, rule.min_first))


def server_of(name: str) -> int:
    """2 for ``server 2``; -1 for anything else."""
    kind, _, number = name.partition(" ")
    return int(number) if kind == "server" and number.isdecimal() and len(number) < 10 else -1


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
    credentials = Credentials(bytes.fromhex(env["SLIPSTREAM_RUN_KEY"]), encrypt)
    name = f"server {index}"
    transport = ZmqTransport(
        name,
        host=host,
        credentials=credentials,
        process=credentials.process_of(name),
        send_buffer_bytes=SERVER_SEND_BUFFER_BYTES,
    )
    member = Member(transport.name, transport)
    member.on_tick(transport.guard.look)
    server = Server(index, member)
    print(json.dumps({"address": transport.address}), flush=True)
    os.dup2(2, 1)  # nothing else may follow the address
    while not server.done and not abandoned():
        try:
            member.pump_once(server.looks_every_s)
            server.look()
        except RuntimeFault as fault:
            member.send(HUB, Leave(str(fault)), priority=CONTROL)
            member.fail(fault)
        except Exception as error:  # whatever it is, the others should hear why, and not wait
            reason = internal_fault(error)
            member.send(HUB, Leave(str(reason)), priority=CONTROL)
            member.fail(reason)
    member.stop()
    return 0 if member.fault is None else 1


def abandoned() -> bool:
    """Whether whoever started this process has let go of its standard input."""
    readable, _, _ = select.select([0], [], [], 0)
    return bool(readable) and not os.read(0, 4096)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_descriptor_limit()
    code = serve(os.environ)
    sys.stderr.flush()
    # At once: everything is closed, and taking torch apart takes most of a second, for which the
    # worker that waits for this process would wait, too.
    os._exit(code)
