"""A whole job in one thread, on virtual time, in an order that a seed decides.

The workers' exchanges, the servers and their holders are the runtime's own objects; only threads,
sockets and the clock are played. What a seed shows, it shows again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream._native import mean_into
from slipstream.errors import ConfigError, WaitLimit
from slipstream.runtime.configuration import Configuration, OptimizerRecipe
from slipstream.runtime.exchange import LinkExchange
from slipstream.runtime.member import BEAT_S, HUB
from slipstream.runtime.server import Server
from slipstream.strategy import Plan, Strategy
from slipstream.testing.cast import FOREVER_S, ByteSlots, Event, SimulatedMember
from slipstream.testing.clock import VirtualClock
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import Configure, Message, Ready
from slipstream.types import Cluster, Spec, Values

ACTION_S = 0.01
SLOW = 0.05  # how often a slow worker acts, compared with the others
Tensors = tuple[bytes | None, ...]  # by tensor; None: no contribution, or no result
Contribute = Callable[[int, int, int], bytes | None]  # rank, round, tensor


@dataclass(frozen=True)
class Simulation:
    """What happened. ``contributions`` and ``results`` are by round, then by rank."""

    plan: Plan
    contributions: tuple[tuple[Tensors, ...], ...]
    results: tuple[tuple[Tensors, ...], ...]
    trace: tuple[Event, ...]
    max_spread: int  # rounds between the foremost and the hindmost worker, at most
    sent: tuple[Counter[str], ...]  # by rank: payload bytes by scheme
    received: tuple[Counter[str], ...]
    refused: int
    virtual_s: float


def simulate(
    strategy: Strategy,
    specs: Sequence[Spec],
    *,
    workers: int,
    servers: int = 0,
    rounds: int = 3,
    seed: int = 0,
    contribute: Contribute | None = None,
    slow: int | None = None,
    optimizer: OptimizerRecipe | None = None,
) -> Simulation:
    """Train ``rounds`` rounds over links that deliver in an order decided by ``seed``.

    Contributions are normally distributed unless ``contribute`` says otherwise; worker ``slow``
    acts seldom. ``optimizer`` runs at the servers of a strategy with ``update="server"``, on
    weights that begin at zero.
    """
    plan = strategy.plan(specs, Cluster(workers, servers))
    if any(route.road != "links" for route in plan.routes):
        raise ConfigError(f"{strategy.name} uses collectives; only messages can be simulated")
    given = contribute or normal(specs, seed)
    stage = Stage(plan, seed, optimizer)
    cast = [
        Worker(
            rank,
            stage,
            [tuple(given(rank, r, t) for t in range(len(specs))) for r in range(rounds)],
        )
        for rank in range(workers)
    ]
    spread = stage.play(cast, slow)
    return Simulation(
        plan=plan,
        contributions=tuple(zip(*(worker.contributions for worker in cast), strict=True)),
        results=tuple(zip(*(worker.results for worker in cast), strict=True)),
        trace=tuple(stage.trace),
        max_spread=spread,
        sent=tuple(worker.exchange.sent for worker in cast),
        received=tuple(worker.exchange.received for worker in cast),
        refused=sum(member.refused for member in stage.members.values()),
        virtual_s=stage.clock.now,
    )


def normal(specs: Sequence[Spec], seed: int) -> Contribute:
    """Everybody contributes to everything, every time something else."""

    def contribute(rank: int, round_: int, tensor: int) -> bytes:
        spec = specs[tensor]
        numbers = np.random.default_rng((seed, rank, round_, tensor)).normal(size=spec.numel)
        out = Values.empty(spec.numel, spec.dtype)
        mean_into(out.data, [numbers], "float64", 1.0, out_dtype=spec.dtype)
        return out.data.tobytes()

    return contribute


class Stage:
    """The network and everybody on it; servers are told the plan when it is set up."""

    def __init__(self, plan: Plan, seed: int, optimizer: OptimizerRecipe | None) -> None:
        self.plan = plan
        self.clock = VirtualClock()
        self.trace: list[Event] = []
        self.random = random.Random(seed)
        self._network = MemoryNetwork(seed)
        nodes = [*plan.cluster.worker_nodes, *plan.cluster.server_nodes]
        names = [plan.cluster.name(node) for node in nodes]
        self.members = {name: self._member(name) for name in names}
        self.servers = [
            Server(index, self.members[plan.cluster.name(node)])
            for index, node in enumerate(plan.cluster.server_nodes)
        ]
        for rank in plan.cluster.worker_nodes:
            worker = self.members[plan.cluster.name(rank)]
            for name in names:
                worker.transport.connect(name, worker.transport.address)
            worker.expect(*(names if worker.is_hub else [HUB]))
        self._configure(optimizer)

    def _member(self, name: str) -> SimulatedMember:
        return SimulatedMember(name, self._network, self.clock, move=self.move, trace=self.trace)

    def _configure(self, optimizer: OptimizerRecipe | None) -> None:
        hub = self.members[HUB]
        answers: dict[str, str | None] = {}

        def on_ready(message: Message) -> None:
            assert isinstance(message.body, Ready)
            answers[message.sender] = message.body.reason

        hub.on(Ready, on_ready)
        addresses = {
            self.plan.cluster.name(rank): self.plan.cluster.name(rank)
            for rank in self.plan.cluster.worker_nodes
        }
        content = Configuration.of(self.plan, addresses, FOREVER_S, optimizer).encode()
        for server in self.servers:
            hub.send(server.member.name, Configure(), [content])
        while self.move():
            pass
        for name, reason in answers.items():
            if reason is not None:
                raise ConfigError(f"{name} refused the plan: {reason}")

    def move(self) -> bool:
        """One message arrives and is handled; False when none is under way."""
        receiver = self._network.deliver()
        if receiver is not None:
            self.members[receiver].take(arrived=1)
        return receiver is not None

    def play(self, cast: Sequence[Worker], slow: int | None) -> int:
        """Let workers act and messages arrive until all are done; how far workers were apart."""
        running = {worker: worker.train() for worker in cast}
        stuck: set[Worker] = set()
        spread = 0
        while running:
            if self.random.random() < 0.5:
                self.move()
                continue
            weights = [SLOW if worker.rank == slow else 1.0 for worker in running]
            (worker,) = self.random.choices(list(running), weights)
            went_on = next(running[worker], None)
            self.clock.advance(ACTION_S)
            worker.member.take(arrived=0)
            if went_on is None:
                del running[worker]
            stuck = stuck | {worker} if went_on is False else set()
            if running and stuck == set(running):
                self._give_up(cast, stuck)
            rounds = [w.member.round for w in cast]
            spread = max(spread, max(rounds) - min(rounds))
        return spread

    def _give_up(self, cast: Sequence[Worker], stuck: set[Worker]) -> None:
        """Nobody can go on: say so as the runtime would, once all know how far the others are."""
        for _ in range(2):
            self.clock.advance(BEAT_S)
            for member in self.members.values():
                member.tick()
            while self.move():
                pass
        min(stuck, key=lambda worker: worker.rank).exchange.wait()
        raise AssertionError("a worker that was stuck went on by itself")


@dataclass(eq=False)
class Worker:
    """One worker and what it does; ``train`` yields after every action whether it could go on."""

    rank: int
    stage: Stage
    contributions: list[Tensors]
    results: list[Tensors] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.stage.plan
        self.member = self.stage.members[plan.cluster.name(self.rank)]
        self.slots = ByteSlots(plan.specs)
        self.exchange = LinkExchange(self.rank, plan, self.member, self.slots, limit_s=FOREVER_S)

    def train(self) -> Iterator[bool]:
        for step, contributions in enumerate(self.contributions):
            self.exchange.step = step
            self.slots.begin(contributions)
            yield from self._backward()
            yield from self._forward()
            self.results.append(self.slots.results())

    def _backward(self) -> Iterator[bool]:
        specs = self.stage.plan.specs
        used = [t for t in range(len(specs)) if self.slots.source(t) is not None]
        if self.stage.plan.schedule.leaves_during_backward:
            for tensor in sorted(used, key=lambda t: -specs[t].order):
                self.exchange.ready(tensor)
                yield True
        self.exchange.flush()
        yield True

    def _forward(self) -> Iterator[bool]:
        """Layer by layer, as a forward pass would need the results."""
        specs = self.stage.plan.specs
        for tensor in sorted(range(len(specs)), key=lambda t: specs[t].order):
            while not self._has(tensor):
                yield False
            yield True

    def _has(self, tensor: int) -> bool:
        try:
            self.exchange.wait([tensor])
        except WaitLimit:
            return False
        return True
