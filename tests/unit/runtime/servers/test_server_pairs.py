"""One server holds shards of several pairs: configured one by one, and kept apart."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from slipstream.plan import Plan
from slipstream.runtime.members.member import HUB, Member
from slipstream.runtime.servers.configuration import Configuration
from slipstream.runtime.servers.server import Server
from slipstream.systems import backup_workers, push_pull
from slipstream.testing.clock import VirtualClock
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import (
    AnyBody,
    Configure,
    Inquire,
    Message,
    Publish,
    Push,
    Ready,
    Release,
    checksum,
)
from slipstream.types import Cluster, Spec

WORKERS = ("rank 0", "rank 1")


def plan_of(numel: int, strategy: Any = None) -> Plan:
    spec = Spec("w", (numel,), "float32", 0)
    return (strategy or push_pull()).plan([spec], Cluster(len(WORKERS), 1))  # type: ignore[no-any-return]


class Bench:
    """A server, and the two workers that talk to it."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.member = Member("server 0", self.network.endpoint("server 0"), clock=VirtualClock())
        self.server = Server(0, self.member)
        for name in WORKERS:
            self.network.endpoint(name).connect("server 0", "")

    def tell(self, sender: str, body: AnyBody, frames: Any = (), *, pair: int) -> None:
        self.network.endpoint(sender).send("server 0", body, frames, pair=pair)
        self.member.pump_once(0.0)

    def configure(self, plan: Plan, pair: int) -> None:
        workers = dict.fromkeys(WORKERS, "")
        content = Configuration.of(plan, workers, {}, 1e9, None).encode()
        self.tell(HUB, Configure(), [content], pair=pair)

    def push(self, rank: int, values: list[float], *, pair: int) -> None:
        frames = [np.array(values, np.float32)]
        body = Push(0, 0, 0, [1], checksum(frames))
        self.tell(f"rank {rank}", body, frames, pair=pair)

    def heard(self, name: str, kind: type[Any]) -> list[Message[Any]]:
        messages = []
        while (message := self.network.endpoint(name).receive(0.0)) is not None:
            if isinstance(message.body, kind):
                messages.append(message)
        return messages


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_every_pair_is_configured_once_and_answered_for_itself(bench: Bench) -> None:
    for pair in (0, 2, 2):
        bench.configure(plan_of(3), pair)
    assert [(m.pair, m.body) for m in bench.heard(HUB, Ready)] == [(0, Ready()), (2, Ready())]
    assert sorted(bench.server.shards) == [0, 2]
    assert bench.member.refused == 1


def test_rounds_of_pairs_do_not_mix(bench: Bench) -> None:
    bench.configure(plan_of(2), 0)
    bench.configure(plan_of(3), 1)
    bench.push(0, [1, 2], pair=0)
    bench.push(0, [1, 2, 3], pair=1)
    bench.push(1, [3, 4, 5], pair=1)
    results = bench.heard("rank 1", Publish)
    assert [m.pair for m in results] == [1]
    assert np.frombuffer(results[0].frames[0], np.float32).tolist() == [2, 3, 4]
    bench.push(1, [3, 4], pair=0)
    (result,) = bench.heard("rank 1", Publish)
    assert result.pair == 0
    assert np.frombuffer(result.frames[0], np.float32).tolist() == [2, 3]


def test_a_pair_that_is_not_configured_has_no_plan(bench: Bench) -> None:
    bench.configure(plan_of(3), 0)
    bench.push(0, [1, 2, 3], pair=1)
    bench.tell("rank 1", Inquire(), pair=7)
    assert bench.member.refused == 2
    assert bench.member.last_refusal == "rank 1: Inquire before the plan is known"


def test_a_pair_that_is_trained_otherwise_takes_no_memory(bench: Bench) -> None:
    bench.configure(plan_of(3), 0)
    bench.configure(plan_of(3), 1)
    old = weakref.ref(bench.server.shards[0].aggregator)
    bench.push(0, [1, 2, 3], pair=0)
    bench.tell(HUB, Release(), pair=0)
    gc.collect()
    assert old() is None
    assert sorted(bench.server.shards) == [1]
    bench.push(1, [1, 2, 3], pair=0)
    assert bench.member.last_refusal == "rank 1: Push before the plan is known"
    for rank in (0, 1):
        bench.push(rank, [1, 2, 3], pair=1)
    assert [m.pair for m in bench.heard("rank 1", Publish)] == [1]


def test_only_rank_0_releases_what_is_configured(bench: Bench) -> None:
    bench.configure(plan_of(3), 1)
    bench.tell("rank 1", Release(), pair=1)
    assert bench.member.last_refusal == "rank 1: Release from rank 1"
    bench.tell(HUB, Release(), pair=2)
    assert bench.member.last_refusal == "rank 0: pair 2 is not configured"
    assert sorted(bench.server.shards) == [1]


def test_every_pair_has_rounds_that_close_by_time(bench: Bench) -> None:
    bench.configure(plan_of(3), 0)
    assert [len(bench.server._coordinators), bench.server.tick_every_s] == [1, 0.25]
    bench.configure(plan_of(3, backup_workers(first=2, close_after_s=1.0)), 1)
    assert [len(bench.server._coordinators), bench.server.tick_every_s] == [2, 0.05]
