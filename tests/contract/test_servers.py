"""What a server makes of messages, whatever its parts are; the test plays all workers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from slipstream.codecs import Above, Dense, Filter
from slipstream.consistency import All, Asynchronous, ByAge, Consistency, FirstOf, KAsync
from slipstream.methods import Rounds
from slipstream.routes import Everywhere, Route
from slipstream.runtime.files.state_entries import (
    FIRST_WEIGHTS,
    PUBLISHED,
    RESIDUAL,
    SNAPSHOT,
    STATE,
    WEIGHTS,
)
from slipstream.runtime.servers.configuration import Configuration
from slipstream.runtime.servers.server import Server
from slipstream.schedules import AfterBackward
from slipstream.strategy import Strategy
from slipstream.testing import VirtualClock
from slipstream.testing.members import SimulatedMember
from slipstream.topologies import Sharded, Tree, TwoLevel
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import (
    AnyBody,
    Arrived,
    Configure,
    Fetch,
    Lease,
    Leased,
    Message,
    Publish,
    Push,
    Ready,
    RouteUpdated,
    State,
    WorkerLeft,
    checksum,
)
from slipstream.types import Buffer, Cluster, EncodeContext, OptimizerRecipe, Spec, Values
from slipstream.updates import Ema, LocalSteps, Nesterov, Update, UserOptimizer

SPECS = [Spec("weight", (2,), "float32", 0)]
AT_HOLDER = Update(outer=UserOptimizer(at="server"))


def state(name: str, frame: Buffer, *entries: tuple[int, str, str], damage: int = 0) -> State:
    """All of the state of the only chunk, in one piece."""
    crc = checksum([frame]) ^ damage
    return State(name, 0, 0, memoryview(frame).nbytes, crc, list(entries))


class ServerHarness:
    """The only server of a job with one tensor of two weights.

    Args:
        strategy: What the server is configured with.
        workers: How many workers the test plays.
        hosts: The ranks of each worker, where hosts are the workers.
        momentum: Of the server's optimizer, where it updates.
    """

    def __init__(
        self,
        strategy: Strategy,
        workers: int,
        hosts: tuple[tuple[int, ...], ...] = (),
        momentum: float = 0.0,
    ) -> None:
        self.plan = strategy.plan(SPECS, Cluster(workers, servers=1, members=hosts))
        self._network = MemoryNetwork()
        self.member = SimulatedMember(
            "server 0",
            self._network,
            VirtualClock(),
            move=lambda: False,
            waits=lambda: False,
            trace=[],
        )
        self.server = Server(0, self.member)
        names = [f"rank {rank}" for rank in range(self.plan.cluster.ranks)]
        for name in names:
            self._network.endpoint(name).connect("server 0", "")
        sgd = OptimizerRecipe("SGD", [{"lr": 1.0, "momentum": momentum}], [0])
        optimizer = sgd if self.plan.update.holder_applies else None
        addresses = dict.fromkeys([*names, "server 0"], "")
        content = Configuration.of(self.plan, addresses, {}, 1e9, optimizer).encode()
        self.send(0, Configure(), content)
        assert Ready() in [message.body for message in self.received(0)]
        if self.plan.update.holder_applies:
            self.load(0.0, 0.0)

    def send(self, rank: int, body: AnyBody, *frames: Buffer) -> None:
        """Send a message from a worker; the server handles it at once."""
        self._network.endpoint(f"rank {rank}").send("server 0", body, frames)
        self.member.take(arrived=1)
        self.member.check()

    def received(self, rank: int) -> list[Message[Any]]:
        """Return what a worker has received since the last call."""
        messages = []
        while (message := self._network.endpoint(f"rank {rank}").receive(0.0)) is not None:
            messages.append(message)
        return messages

    def load(self, *weights: float) -> None:
        frame = np.float32(weights)
        self.send(0, state(FIRST_WEIGHTS, frame), frame)

    def push(
        self,
        rank: int,
        *gradient: float,
        round_: int = 0,
        read: int = 0,
        weights: Sequence[int] = (),
    ) -> None:
        (codec,) = {route.up for route in self.plan.routes}
        values = Values(np.float32(gradient).view(np.uint8), "float32")
        residual = codec.init(values.numel, values.dtype)
        frames = codec.encode(values, residual, EncodeContext())
        counts = [len(frames)]
        body = Push(0, round_, read, counts, checksum(frames), read=read, weights=list(weights))
        self.send(rank, body, *frames)

    def published(self, rank: int) -> list[list[float]]:
        """Return the results that a worker has received since the last call."""
        return [
            np.frombuffer(message.frames[0], np.float32).tolist()
            for message in self.received(rank)
            if isinstance(message.body, Publish)
        ]

    def entry(self, name: str) -> list[float]:
        """Return one entry of the state of the weights."""
        self.send(0, Fetch(STATE))
        (message,) = (m for m in self.received(0) if isinstance(m.body, State))
        at = [entry for _, entry, _ in message.body.entries].index(name)
        numbers = np.frombuffer(message.frames[0], np.float32).tolist()
        return numbers[2 * at : 2 * at + 2]

    def residual(self) -> list[float]:
        """Return what the server has not sent of its results."""
        self.send(0, Fetch(RESIDUAL))
        (message,) = (m for m in self.received(0) if isinstance(m.body, State))
        return np.frombuffer(message.frames[0], np.float32).tolist()

    def lease(self, rank: int) -> tuple[int, int]:
        """Lease a batch, of three an epoch."""
        self.send(rank, Lease(3))
        (leased,) = (m.body for m in self.received(rank) if isinstance(m.body, Leased))
        return leased.epoch, leased.number


def sharded(consistency: Consistency, update: Update, up: Dense | Filter = Dense()) -> Strategy:  # noqa: B008
    return Strategy("sample", Rounds(Everywhere(Route(Sharded(), up=up)), consistency, update))


# ---- workers that leave


def test_worker_left_from_another_rank_is_refused() -> None:
    harness = ServerHarness(sharded(Consistency(), Update()), workers=3)
    harness.send(1, WorkerLeft(2))
    assert "rank 1 does not speak for rank 2" in harness.member.last_refusal
    for rank in (0, 1):
        harness.push(rank, 3.0, 6.0)
    assert harness.published(0) == [], "the round waits for rank 2"
    harness.push(2, 3.0, 0.0)
    assert harness.published(0) == [[3.0, 4.0]]


@pytest.mark.parametrize("speaker", [0, 2])
def test_worker_left_from_rank_0_or_itself_closes_the_round(speaker: int) -> None:
    harness = ServerHarness(sharded(Consistency(All(without_lost=True)), Update()), workers=3)
    for rank in (0, 1):
        harness.push(rank, 3.0, 6.0)
    harness.send(speaker, WorkerLeft(2))
    assert harness.member.refused == 0
    assert harness.published(0) == [[3.0, 6.0]]


@pytest.mark.parametrize("hosts", [(), ((0, 1), (2, 3))], ids=["a worker", "a host"])
def test_lost_worker_may_return_but_no_lost_host(hosts: tuple[tuple[int, ...], ...]) -> None:
    """The ranks that are left of a host may still send what the host had begun."""
    route = Route(TwoLevel(Sharded()), up=Dense())
    strategy = Strategy(
        "first", Rounds(Everywhere(route), Consistency(FirstOf(first=1)), AT_HOLDER)
    )
    harness = ServerHarness(strategy, 2, hosts)
    speaker = hosts[1][0] if hosts else 1
    harness.send(0, WorkerLeft(1))
    harness.push(speaker, 1.0, 1.0)
    assert harness.published(speaker) == ([] if hosts else [[-1.0, -1.0]])


def receivers(harness: ServerHarness, workers: Sequence[int], round_: int) -> list[int]:
    """Make a round; return the workers to which the server sends its result."""
    for rank in workers:
        harness.push(rank, 1.0, 1.0, round_=round_, read=round_)
    return [rank for rank in range(4) if harness.published(rank)]


def test_results_go_to_every_worker_until_all_bypass_a_lost_one() -> None:
    """The server sends to rank 0, rank 0 to rank 1, and so on; rank 1 is lost."""
    chain = Tree((((0,), (1,), (2,), (3,), ()),))
    route = Route(chain, up=Dense())
    strategy = Strategy("chain", Rounds(Everywhere(route), Consistency(All(without_lost=True))))
    harness = ServerHarness(strategy, workers=4)
    assert receivers(harness, range(4), 0) == [0]
    harness.send(0, WorkerLeft(1))
    rest = [0, 2, 3]
    assert [rank for rank in range(4) if harness.published(rank)] == rest, "the last result again"
    assert receivers(harness, rest, 1) == rest
    for rank in (0, 3):
        harness.send(rank, RouteUpdated(1))
    assert receivers(harness, rest, 2) == rest, "rank 2 does not bypass it yet"
    harness.send(2, RouteUpdated(1))
    assert receivers(harness, rest, 3) == [0]


# ---- means


def test_mean_over_uneven_hosts_is_the_mean_over_workers() -> None:
    """A host sends its sum divided by the mean number of workers of a host."""
    strategy = Strategy("hosts", Rounds(Everywhere(Route(TwoLevel(Sharded()), up=Dense()))))
    harness = ServerHarness(strategy, 2, hosts=((0,), (1, 2)))
    harness.push(0, 1 / 1.5, 0.0)  # rank 0 has 1, 0
    harness.push(1, 5 / 1.5, 12 / 1.5)  # ranks 1 and 2 have 2, 4 and 3, 8
    np.testing.assert_allclose(harness.published(0), [[2.0, 4.0]], rtol=1e-6)


def test_late_outer_gradient_is_divided_by_its_number_of_blocks() -> None:
    """Rank 1 missed two rounds, and sends the sum of three blocks of local steps."""
    strategy = Strategy(
        "outer rounds",
        Rounds(
            Everywhere(Route(Sharded(), up=Filter(Above(0.0, decay="constant")))),
            Consistency(FirstOf(first=1)),
            Update(LocalSteps(2), Nesterov(lr=1.0, momentum=0.0, at="server")),
            AfterBackward(),
        ),
    )
    harness = ServerHarness(strategy, workers=2)
    for round_ in range(2):
        harness.push(0, 0.0, 0.0, round_=round_, read=round_)
    harness.push(1, 3.0, 6.0, round_=2, read=2, weights=[3])
    assert harness.published(1) == [[-1.0, -2.0]]


# ---- updates at the server


def test_old_gradient_damps_only_its_own_update() -> None:
    """Gradient k updates old: rate 1/k; settings are sent only when they change."""
    strategy = sharded(Consistency(Asynchronous(), damping=ByAge()), AT_HOLDER)
    harness = ServerHarness(strategy, workers=2)
    weights = [0.0]
    for rank, read in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (0, 5)]:
        harness.push(rank, -1.0, 0.0, round_=read, read=read)
        weights.append(harness.published(rank)[0][0])
    assert np.diff(weights).tolist() == [1.0, 1.0, 1.0, 1.0, 0.25, 1.0]


@pytest.mark.parametrize("decay", [0.25, 0.9])
def test_averages_keep_the_share_of_decay(decay: float) -> None:
    update = Update(outer=UserOptimizer(at="server"), average=Ema(decay))
    harness = ServerHarness(sharded(Consistency(), update), workers=1)
    weights, averages = np.float64([4.0, -8.0]), np.float64([4.0, -8.0])
    harness.load(*weights)
    for step, gradient in enumerate([[1.0, 2.0], [-3.0, 0.5]]):
        harness.push(0, *gradient, round_=step, read=step)
        weights = weights - gradient
        averages = decay * averages + (1 - decay) * weights
        assert harness.entry("weights") == weights.tolist()
        np.testing.assert_allclose(harness.entry("averaged weights"), averages, rtol=1e-6)


def test_saved_state_has_the_number_of_its_updates() -> None:
    harness = ServerHarness(sharded(Consistency(FirstOf(first=1)), AT_HOLDER), workers=1)
    for round_ in range(3):
        harness.push(0, 1.0, 1.0, round_=round_, read=round_)
    harness.received(0)
    harness.send(0, Fetch(SNAPSHOT))
    (saved,) = (m.body for m in harness.received(0) if isinstance(m.body, State))
    assert saved.round == 3


def test_loaded_state_replaces_all_of_the_state_before() -> None:
    harness = ServerHarness(sharded(Consistency(), AT_HOLDER), workers=1, momentum=0.5)
    harness.push(0, 2.0, 4.0)
    assert harness.published(0) == [[-2.0, -4.0]]
    harness.send(0, state(STATE, b""), b"")  # of an optimizer that has made no step
    harness.push(0, 1.0, 0.0, round_=1, read=1)
    assert harness.published(0) == [[-3.0, -4.0]]


def test_damaged_residual_is_refused_and_changes_nothing() -> None:
    route = Route(Sharded(), up=Dense(), down=Filter(Above(1.0, decay="constant")))
    harness = ServerHarness(Strategy("filtered", Rounds(Everywhere(route))), workers=2)
    for rank in range(2):
        harness.push(rank, 0.5, 2.0)
    frame = np.float32([8.0, 8.0])
    harness.send(0, state(PUBLISHED, frame, damage=1), frame)
    assert "checksum" in harness.member.last_refusal
    assert harness.residual() == [0.5, 0.0]
    harness.send(0, state(PUBLISHED, frame[:1]), frame[:1])
    assert "of 4, expected 8 in all" in harness.member.last_refusal
    harness.send(1, state(PUBLISHED, frame), frame)
    assert f"{PUBLISHED} 0 from rank 1 is not expected" in harness.member.last_refusal
    assert harness.residual() == [0.5, 0.0]
    harness.send(0, state(PUBLISHED, frame), frame)
    assert harness.residual() == [8.0, 8.0]


def test_weights_begin_averages_only_if_they_are_the_first() -> None:
    update = Update(outer=UserOptimizer(at="server"), average=Ema(0.5))
    harness = ServerHarness(sharded(Consistency(), update), workers=1)
    harness.load(4.0, 8.0)
    frame = np.float32([1.0, 2.0])
    harness.send(0, state(WEIGHTS, frame), frame)
    assert harness.entry("weights") == [1.0, 2.0]
    assert harness.entry("averaged weights") == [4.0, 8.0]
    harness.load(3.0, 6.0)
    assert harness.entry("averaged weights") == [3.0, 6.0]


# ---- decisions


@pytest.mark.parametrize("rule", [FirstOf(first=1), KAsync(1)], ids=["FirstOf", "KAsync"])
def test_worker_cannot_report_a_gradient_as_arrived(rule: FirstOf | KAsync) -> None:
    harness = ServerHarness(sharded(Consistency(rule), AT_HOLDER), workers=2)
    harness.send(1, Arrived(1, 0))
    assert "rank 1 is no server" in harness.member.last_refusal


# ---- leased batches


@pytest.mark.parametrize("rule", [FirstOf(first=2), KAsync(2)], ids=["FirstOf", "KAsync"])
@pytest.mark.parametrize("arrived", [True, False])
def test_batch_of_a_worker_that_left_is_leased_again_unless_its_gradient_arrived(
    arrived: bool, rule: FirstOf | KAsync
) -> None:
    harness = ServerHarness(sharded(Consistency(rule), AT_HOLDER), workers=3)
    assert [harness.lease(0), harness.lease(1)] == [(0, 0), (0, 1)]
    if arrived:
        harness.push(1, 1.0, 1.0)
    harness.send(1, WorkerLeft(1))
    assert harness.lease(2) == ((0, 2) if arrived else (0, 1))


def test_batch_whose_gradient_waits_for_its_update_is_not_leased_again() -> None:
    harness = ServerHarness(sharded(Consistency(KAsync(2)), AT_HOLDER), workers=3)
    assert [harness.lease(rank) for rank in range(3)] == [(0, 0), (0, 1), (0, 2)]
    harness.push(0, 1.0, 1.0)
    harness.push(1, 1.0, 1.0)  # makes update 0
    harness.push(2, 1.0, 1.0)  # of round 0 still, in a later update
    assert [harness.lease(rank) for rank in range(3)] == [(1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("keeps", [True, False], ids=["kept in the residual", "lost"])
def test_dropped_batch_is_leased_again_only_if_its_gradient_is_lost(keeps: bool) -> None:
    up = Filter(Above(0.0)) if keeps else Dense()
    strategy = sharded(Consistency(FirstOf(first=1)), AT_HOLDER, up)
    harness = ServerHarness(strategy, workers=2)
    assert [harness.lease(0), harness.lease(1)] == [(0, 0), (0, 1)]
    harness.push(0, 1.0, 1.0)
    harness.push(1, 1.0, 1.0)  # too late for round 0
    assert harness.lease(0) == ((0, 2) if keeps else (0, 1))
