"""The network and the members of a simulation, and the order in which they act."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.errors import ConfigError
from slipstream.plan import Plan
from slipstream.runtime.members.member import BEAT_S, HUB
from slipstream.runtime.servers.accounts import ServerFigures
from slipstream.runtime.servers.configuration import Configuration
from slipstream.runtime.servers.server import Server
from slipstream.runtime.servers.shard_service import ShardService
from slipstream.testing.clock import VirtualClock
from slipstream.testing.members import (
    FOREVER_S,
    Event,
    Owed,
    SimulatedMember,
    Tensors,
    owed_by,
    zeros,
)
from slipstream.testing.worker import Worker
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import Configure, Lost, Message, Ready
from slipstream.types import Node, OptimizerRecipe

ACTION_S = 0.01


class Stage:
    """The members of a simulated job. Servers get the plan when the stage is created."""

    def __init__(self, plan: Plan, seed: int, optimizer: OptimizerRecipe | None) -> None:
        self.plan = plan
        self._parts = plan.strategy.own_modules  # this process has them already
        self.clock = VirtualClock()
        self.trace: list[Event] = []
        self.random = random.Random(seed)
        self._playing = False
        self._stuck: set[Worker] = set()  # workers that cannot continue since the last message
        self._to_give_up: list[Worker] = []
        self._dead: set[str] = set()  # members that no longer handle messages, either
        self._network = MemoryNetwork(seed)
        nodes = [*plan.cluster.worker_nodes, *plan.cluster.server_nodes]
        names = [plan.cluster.name(node) for node in nodes]
        self.members = {name: self._member(name) for name in names}
        self.servers = [
            Server(index, self.members[plan.cluster.name(node)], self._parts)
            for index, node in enumerate(plan.cluster.server_nodes)
        ]
        for rank in plan.cluster.worker_nodes:
            worker = self.members[plan.cluster.name(rank)]
            for name in names:
                worker.transport.connect(name, self.members[name].transport.address)
            worker.expect(*(names if worker.is_hub else [HUB]))
        self._configure(optimizer)

    def _member(self, name: str) -> SimulatedMember:
        return SimulatedMember(
            name,
            self._network,
            self.clock,
            move=self.move,
            waits=lambda: not self._playing,
            trace=self.trace,
        )

    def _configure(self, optimizer: OptimizerRecipe | None) -> None:
        if not self.servers:
            return  # parts of the user's own may then be of any kind, and have no JSON
        hub = self.members[HUB]
        answers: dict[str, str | None] = {}

        def on_ready(message: Message[Ready]) -> None:
            answers[message.sender] = message.body.reason

        hub.on(Ready, on_ready)
        nodes = [*self.plan.cluster.worker_nodes, *self.plan.cluster.server_nodes]
        addresses = {name: name for name in map(self.plan.cluster.name, nodes)}
        content = Configuration.of(
            self.plan, addresses, {}, FOREVER_S, optimizer, self._parts
        ).encode()
        for server in self.servers:
            hub.send(server.member.name, Configure(), [content])
        self.drain()
        for name, reason in answers.items():
            if reason is not None:
                raise ConfigError(f"{name} refused the plan: {reason}")

    def move(self) -> bool:
        """Deliver one message and handle it; return False if none is in flight."""
        receiver = self._network.deliver()
        if receiver in self._dead:
            self.members[receiver].transport.receive(0.0)
        elif receiver is not None:
            self._stuck.clear()
            self.members[receiver].take(arrived=1)
        return receiver is not None

    def drain(self) -> None:
        while self.move():
            pass

    def retire(self, rank: int, speaker: str) -> None:
        """Report to servers that a worker has left, or as rank 0 that it is lost."""
        # Imported here: it imports torch, which most simulations do not need.
        from slipstream.runtime.servers.shards import Shards

        shards = Shards(tuple(server.member.name for server in self.servers))
        shards.retire(rank, self.members[speaker])
        if self.plan.delivers_every_result:
            for worker in self.plan.cluster.worker_nodes:
                self.members[speaker].send(self.plan.cluster.name(worker), Lost(rank))

    def figures(self) -> list[ServerFigures]:
        return ShardService(len(self.servers), self.members[HUB], FOREVER_S).accounts()

    def owed_back(self, workers: Sequence[Worker]) -> Owed:
        """Return what holders' codecs hold back of results, at servers and workers."""
        owed: Owed = {}
        plan = self.plan
        memories: dict[Node, Callable[[int], Sequence[Any]]] = {
            worker.rank: worker.held_memories for worker in workers
        }
        for node, server in zip(plan.cluster.server_nodes, self.servers, strict=True):
            assert server.shard is not None
            memories[node] = server.shard.aggregator.memories
        for node, residuals in memories.items():
            own_chunks = [
                chunk for chunk in plan.chunks_of(node) if plan.holders_of(chunk)[0] == node
            ]
            for tensor, part in owed_by(plan, own_chunks, residuals).items():
                owed[tensor] = owed[tensor] + part if tensor in owed else part
        return owed

    def held(self) -> Tensors:
        """Return the servers' weights, by tensor."""
        if not self.plan.update.holder_applies:
            return ()
        whole = [zeros(spec) for spec in self.plan.specs]
        for node, server in zip(self.plan.cluster.server_nodes, self.servers, strict=True):
            assert server.shard is not None
            for chunk in self.plan.chunks_of(node):
                now = server.shard.aggregator.updater.current(chunk)
                for segment, values in zip(chunk.segments, now, strict=True):
                    if values is not None:
                        part = whole[segment.tensor].part(segment.start, segment.stop)
                        part.data[:] = values.data
        return tuple(values.data.tobytes() for values in whole)

    def play(self, cast: Sequence[Worker]) -> int:
        """Let workers act and messages arrive until all are done; returns the largest spread."""
        running = {worker: worker.train() for worker in cast}
        speed = self.random.uniform(0.3, 0.7)  # of the network
        spread = 0
        self._to_give_up = [worker for worker in cast if worker.conduct.given_up]
        self._playing = True
        while running:
            for worker in [worker for worker in running if worker.dead]:
                self._dead.add(worker.member.name)
                del running[worker]
            able = [worker for worker in running if worker.here and worker not in self._stuck]
            if not able or self.random.random() < speed:
                if not self.move() and not able and not self._pass_time(list(running)):
                    self._give_up(list(running))
                continue
            (worker,) = self.random.choices(able, [worker.conduct.speed for worker in able])
            went_on = next(running[worker], None)
            worker.member.take(arrived=0)
            if went_on is False:
                self._stuck.add(worker)
                continue
            self._advance(self.clock.now + ACTION_S)
            rounds = [worker.member.round for worker in running]
            spread = max(spread, max(rounds) - min(rounds))
            if went_on is None:
                del running[worker]
        self._playing = False
        self.drain()
        return spread

    def _advance(self, now: float) -> None:
        self.clock.now = now
        for worker in [worker for worker in self._to_give_up if not worker.here]:
            self._to_give_up.remove(worker)
            self.retire(worker.rank, HUB)
        for server in self.servers:
            server.tick()
            self.members[server.member.name].take(arrived=0)

    def _pass_time(self, running: Sequence[Worker]) -> bool:
        """Let time pass until a worker returns or a round closes; return False if neither will."""
        before = len(self.trace)
        back = [worker.conduct.back_at for worker in running if not worker.here]
        shards = [server.shard for server in self.servers if server.shard is not None]
        deciders = [shard.coordinator.decider for shard in shards if shard.coordinator is not None]
        limits_s = [each.close_after_s for each in deciders if each is not None]
        due = [self.clock.now + limit_s for limit_s in limits_s if limit_s is not None]
        if back or due:
            self._advance(min(back + due))
        return bool(back) or len(self.trace) > before

    def _give_up(self, running: Sequence[Worker]) -> None:
        """Raise the runtime's error for stuck workers, once all know the others' progress."""
        self._playing = False
        for _ in range(2):
            self.clock.advance(BEAT_S)
            for member in self.members.values():
                member.tick()
            self.drain()
        min(running, key=lambda worker: worker.rank).exchange.wait()
        raise AssertionError("a worker that was stuck continued by itself")
