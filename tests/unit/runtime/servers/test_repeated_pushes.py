"""A worker that sends a push again: refused and counted, answered once, and no memory is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream.codecs import Above, Dense, Filter
from slipstream.consistency import Asynchronous, Consistency, FirstOf, KAsync, Lag
from slipstream.methods import Rounds
from slipstream.plan import Plan
from slipstream.routes import Everywhere, Route
from slipstream.runtime.members.member import HUB, Member
from slipstream.runtime.servers.configuration import Configuration
from slipstream.runtime.servers.server import Server
from slipstream.strategy import Strategy
from slipstream.testing.clock import VirtualClock
from slipstream.topologies import Sharded
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import Configure, Publish, Push, checksum
from slipstream.types import Cluster, OptimizerRecipe, Spec
from slipstream.updates import Update, UserOptimizer

SETTINGS = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
SPECS = [Spec("a", (8,), "float32", 0), Spec("b", (8,), "float32", 1)]
FILTERED = Route(Sharded(), up=Filter(Above(0.0)), down=Dense())
FIRST = Consistency(FirstOf(first=1), Lag(0))
EACH = Consistency(Asynchronous(), Lag(0))


def planned(consistency: Consistency, route: Route) -> Plan:
    update = Update(outer=UserOptimizer(at="server"))
    strategy = Strategy("s", Rounds(Everywhere(route), consistency, update, chunk_bytes=32))
    return strategy.plan(SPECS, Cluster(2, 1))


class Bench:
    """A server that updates, and workers 0 and 1, which are played by hand."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.network = MemoryNetwork()
        self.member = Member("server 0", self.network.endpoint("server 0"), clock=VirtualClock())
        self.server = Server(0, self.member)
        for name in ("rank 0", "rank 1"):
            self.network.endpoint(name).connect("server 0", "")
        recipe = OptimizerRecipe("SGD", [SETTINGS], [0, 0])
        addresses = {"rank 0": "", "rank 1": "", "server 0": ""}
        content = Configuration.of(plan, addresses, {}, 1e9, recipe).encode()
        self.network.endpoint(HUB).send("server 0", Configure(), [content])
        self.settle()

    def settle(self) -> None:
        for _ in range(20):
            self.member.pump_once(0.0)

    def push(self, rank: int, unit: int, round_: int) -> None:
        codec = self.plan.route(self.plan.units[unit]).up
        (chunk,) = self.plan.units[unit].chunks
        values = np.ones(chunk.numel, np.float32)
        frames = [values]
        if isinstance(codec, Filter):
            from samples import values as raw

            from slipstream.types import EncodeContext

            residual = codec.init(chunk.numel, "float32")
            frames = list(codec.encode(raw(values), residual, EncodeContext()))
        body = Push(unit, round_, round_, [1], checksum(frames), [SETTINGS], 0)
        self.network.endpoint(f"rank {rank}").send("server 0", body, frames)
        self.settle()

    def push_all(self, rank: int, round_: int) -> None:
        for unit in self.plan.units:
            self.push(rank, unit.index, round_)

    def answers(self, rank: int) -> list[Publish]:
        found = []
        while (message := self.network.endpoint(f"rank {rank}").receive(0.0)) is not None:
            if isinstance(message.body, Publish):
                found.append(message.body)
        return found


def memory_of(server: Server) -> int:
    """Everything that grows with pushes, counted."""
    shard: Any = server.shard
    collector = shard.aggregator.collector
    held = sum(len(h.arrived) + len(h.early) for h in collector._held.values())
    reported = sum(map(len, shard.coordinator.decider._reports._last.values()))
    return held + len(collector._parts) + len(collector._whole) + reported


@pytest.mark.parametrize("route", [Route(Sharded(), up=Dense()), FILTERED], ids=["dense", "filter"])
def test_a_late_push_that_is_sent_again_is_refused_and_answered_once(route: Route) -> None:
    bench = Bench(planned(FIRST, route))
    units = len(bench.plan.units)
    bench.push_all(0, 0)  # makes round 0 alone
    bench.push_all(1, 0)
    late = bench.answers(1)
    assert len(late) == units
    assert all(body.dropped == [1] for body in late)
    for _ in range(3):
        bench.push_all(1, 0)
    assert bench.answers(1) == []
    assert bench.member.refused == 3 * units
    assert bench.member.last_refusal.startswith("rank 1: rank 1 contributed twice to round 0")
    assert bench.server.shard is not None
    coordinator = bench.server.shard.coordinator
    assert coordinator is not None
    assert coordinator.decider is not None
    assert coordinator.decider.record.dropped == {1: 1}


def test_pushes_of_rounds_that_are_long_over_take_no_memory() -> None:
    bench = Bench(planned(FIRST, Route(Sharded(), up=Dense())))
    sizes = []
    for round_ in range(30):
        bench.push_all(0, round_)
        bench.push(1, 0, round_)  # one unit only: its gradient never becomes whole
        sizes.append(memory_of(bench.server))
    assert max(sizes[2:]) == sizes[2]
    for round_ in range(30):
        bench.push(1, 0, round_)  # and all of them again
    assert bench.member.refused == 30
    assert memory_of(bench.server) == sizes[-1]


def test_a_gradient_that_waits_for_its_update_counts_once_however_often_it_is_sent() -> None:
    bench = Bench(planned(Consistency(KAsync(2)), Route(Sharded(), up=Dense())))
    units = len(bench.plan.units)
    for _ in range(3):
        bench.push_all(1, 0)
    assert bench.member.refused == 2 * units
    assert bench.member.last_refusal.startswith("rank 1: rank 1 contributed twice to round 0")
    assert bench.answers(1) == []
    bench.push_all(0, 0)
    answers = [bench.answers(rank) for rank in (0, 1)]
    assert [len(each) for each in answers] == [units, units]
    assert not any(body.dropped for each in answers for body in each)
    assert bench.server.shard is not None
    assert bench.server.shard.coordinator is not None
    record = bench.server.shard.coordinator.record
    assert record is not None
    assert record.made == {0: 1, 1: 1}
    bench.push_all(0, 2)  # update 1 is open
    assert bench.member.refused == 3 * units
    assert bench.answers(0) == []


def test_gradients_of_updates_that_are_over_take_no_memory() -> None:
    bench = Bench(planned(Consistency(KAsync(1)), Route(Sharded(), up=Dense())))
    sizes = []
    for round_ in range(30):
        bench.push_all(0, round_)
        bench.push(1, 0, round_)  # one unit only: its gradient never becomes whole
        sizes.append(memory_of(bench.server))
    assert max(sizes[2:]) == sizes[2]
    assert bench.member.refused == 29
    assert "rank 1 contributed twice" in bench.member.last_refusal


def test_a_gradient_that_is_an_update_of_its_own_is_applied_once() -> None:
    bench = Bench(planned(EACH, Route(Sharded(), up=Dense())))
    bench.push_all(1, 0)
    assert len(bench.answers(1)) == len(bench.plan.units)
    bench.push_all(1, 0)
    assert bench.answers(1) == []
    assert bench.member.refused == len(bench.plan.units)
