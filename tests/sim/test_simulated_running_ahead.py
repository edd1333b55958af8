"""Workers that run ahead of each other: how old weights may be, and that every gradient counts."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulated_backup_workers import (
    AWAY,
    LEAVES,
    LOST,
    SEEDS,
    SLOW,
    SPECS,
    Reference,
    check_answers,
    conducts,
    pushes_of,
    run,
)

from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.exchange.send_context import SendContext
from slipstream.runtime.exchange.transfer import Transfer
from slipstream.runtime.members.member import HUB
from slipstream.runtime.servers.shard_service import ShardService
from slipstream.systems import async_sgd, bounded_staleness, push_pull
from slipstream.testing import Conduct, Simulation
from slipstream.testing.cluster import Stage
from slipstream.testing.members import Event
from slipstream.torch.capture.remote_optimizer import RemoteOptimizer
from slipstream.torch.capture.synchronizer import Synchronizer
from slipstream.torch.checkpoints.server_state import ServerState
from slipstream.torch.distribute.setup import recipe_for
from slipstream.torch.modes.at_server import RoundSettings, ServerUpdates
from slipstream.torch.tensors.inventory import Inventory
from slipstream.torch.tensors.slots import LiveTensors
from slipstream.torch.tensors.staging import Staging
from slipstream.transports.wire import Publish, Push, WorkerLeft
from slipstream.types import Chunk, Cluster, Spec

ROUNDS = 6


def pieces(chunk: Chunk, tensors: Sequence[bytes | None]) -> tuple[bytes | None, ...]:
    """A chunk's part of something that is given by tensor; all are float32."""
    found: list[bytes | None] = []
    for segment in chunk.segments:
        whole = tensors[segment.tensor]
        found.append(None if whole is None else whole[4 * segment.start : 4 * segment.stop])
    return tuple(found)


@dataclass
class Ledger:
    """One chunk's updates, as the trace and the paper's rules say they must have been."""

    simulation: Simulation
    chunk: Chunk
    applied: list[tuple[int, int]] = field(default_factory=list)  # rank and step, each once
    ages: Counter[int] = field(default_factory=Counter)
    hollow: int = 0

    def __post_init__(self) -> None:
        specs = [
            Spec("", (s.numel,), "float32", i, SPECS[s.tensor].role)
            for i, s in enumerate(self.chunk.segments)
        ]
        self.reference = Reference(specs)
        self.versions = [self.reference.contents()]

    def events(self) -> Iterator[tuple[Event, int]]:
        """What happens to the chunk at its holder, and the rank that it concerns."""
        plan = self.simulation.plan
        unit = plan.unit_of(self.chunk).index
        (node,) = plan.holders[unit]
        holder = plan.cluster.name(node)
        for event in self.simulation.trace:
            came = isinstance(event.body, Push | WorkerLeft) and event.kind == "taken"
            left = isinstance(event.body, Publish) and event.kind == "sent"
            concerned = getattr(event.body, "unit", unit)
            here, other = (event.peer, event.source) if came else (event.source, event.peer)
            if (came or left) and here == holder and concerned == unit:
                yield event, int(other.split()[1])

    def update(
        self, pushes: Sequence[tuple[int, Push]], divisor: int = 1, rate: float = 1.0
    ) -> None:
        """A version of the gradients of these workers, in this order."""
        steps = self.simulation.steps
        given_ = [pieces(self.chunk, steps[rank][push.step].given) for rank, push in pushes]
        self.applied += [(rank, push.step) for rank, push in pushes]
        self.ages.update(len(self.versions) - 1 - push.read for _, push in pushes)
        self.reference.update(given_, divisor, rate)
        self.versions.append(self.reference.contents())

    def check(self) -> None:
        """Workers computed with the versions that their gradients say, and every gradient counts
        once."""
        for event, rank in self.events():
            if isinstance(event.body, Push):
                had = self.simulation.steps[rank][event.body.step].had
                assert pieces(self.chunk, had) == self.versions[event.body.read]
        assert len(set(self.applied)) == len(self.applied)


def gradients(simulation: Simulation) -> set[tuple[int, int]]:
    return {(rank, n) for rank, own in enumerate(simulation.steps) for n in range(len(own))}


def check_ages(simulation: Simulation, ledgers: Sequence[Ledger]) -> None:
    """What servers tell of gradients' age is what happened, tensor by tensor."""
    told: dict[str, Counter[int]] = defaultdict(Counter)
    for figures in simulation.figures:
        for name, ages in figures.staleness.items():
            told[name].update(ages)
    expected: dict[str, Counter[int]] = defaultdict(Counter)
    for ledger in ledgers:
        for segment in ledger.chunk.segments:
            if SPECS[segment.tensor].role == "parameter" and segment.start == 0:
                expected[SPECS[segment.tensor].name].update(ledger.ages)
    assert told == expected


# ---- bounded staleness


def folded(simulation: Simulation, chunk: Chunk, workers: int) -> Ledger:
    """An update is made when all who are here have pushed its clock, of all that has come."""
    ledger = Ledger(simulation, chunk)
    clocks = dict.fromkeys(range(workers), 0)
    waiting: list[tuple[int, int, Push]] = []
    sent: Counter[int] = Counter()
    for event, rank in ledger.events():
        if isinstance(event.body, Publish):
            assert event.body.round == sent[rank] < len(ledger.versions) - 1, "out of order"
            sent[rank] += 1
            continue
        if isinstance(event.body, WorkerLeft):
            clocks.pop(event.body.rank)
        elif isinstance(event.body, Push):
            waiting.append((event.body.round, rank, event.body))
            clocks[rank] += 1
        while (waiting or clocks) and all(at >= len(ledger.versions) for at in clocks.values()):
            members = clocks.keys() | {rank for _, rank, _ in waiting}
            ordered = sorted(waiting, key=lambda each: each[:2])
            waiting = []
            ledger.update([(rank, push) for _, rank, push in ordered], len(members))
    assert not waiting
    return ledger


def check_bounded(simulation: Simulation, workers: int, bound: int) -> None:
    for pushes in pushes_of(simulation).values():
        assert all(push.round - bound <= push.read <= push.round for push in pushes)
    ledgers = [folded(simulation, chunk, workers) for chunk in simulation.plan.chunks]
    for ledger in ledgers:
        ledger.check()
        assert set(ledger.applied) == gradients(simulation)
    for rank, own in enumerate(simulation.steps):
        assert [step.round for step in own] == list(range(len(own))), rank
    check_ages(simulation, ledgers)
    assert simulation.max_spread <= bound + 1


@given(
    bound=st.integers(0, 4),
    workers=st.integers(1, 5),
    servers=st.integers(1, 3),
    overlap=st.booleans(),
    chunk_bytes=st.sampled_from([256, 768]),
    conduct=conducts(SLOW, AWAY),
    seed=SEEDS,
)
@settings(max_examples=60)
def test_nobody_computes_with_weights_older_than_the_bound(
    bound: int,
    workers: int,
    servers: int,
    overlap: bool,
    chunk_bytes: int,
    conduct: dict[int, Conduct],
    seed: int,
) -> None:
    strategy = bounded_staleness(bound, overlap=overlap, chunk_bytes=chunk_bytes)
    simulation = run(strategy, workers, servers, seed, conduct, ROUNDS)
    check_bounded(simulation, workers, bound)
    assert {len(own) for own in simulation.steps} == {ROUNDS}
    assert len(set(simulation.final)) == 1
    assert simulation.refused == 0


def test_fast_workers_do_run_ahead() -> None:
    simulation = run(bounded_staleness(3), 3, 1, 4, {1: Conduct(speed=0.02)}, ROUNDS)
    assert simulation.max_spread == 4
    check_bounded(simulation, 3, 3)
    assert any(p.round - p.read == 3 for pushes in pushes_of(simulation).values() for p in pushes)


@given(
    bound=st.integers(0, 4),
    workers=st.integers(1, 5),
    servers=st.integers(1, 3),
    conduct=conducts(SLOW, LEAVES),
    seed=SEEDS,
)
@settings(max_examples=60)
def test_the_rest_go_on_within_the_bound_when_some_leave(
    bound: int, workers: int, servers: int, conduct: dict[int, Conduct], seed: int
) -> None:
    strategy = bounded_staleness(bound, chunk_bytes=768)
    simulation = run(strategy, workers, servers, seed, conduct, ROUNDS)
    check_bounded(simulation, workers, bound)
    expected = [min(ROUNDS, conduct.get(rank, Conduct()).steps) for rank in range(workers)]
    assert [len(own) for own in simulation.steps] == expected
    staying = [simulation.final[rank] for rank in range(workers) if expected[rank] == ROUNDS]
    assert len(set(staying)) <= 1
    assert simulation.refused == 0


@given(workers=st.integers(1, 5), servers=st.integers(1, 3), conduct=conducts(SLOW), seed=SEEDS)
@settings(max_examples=60)
def test_a_bound_of_zero_is_the_rounds_of_push_pull(
    workers: int, servers: int, conduct: dict[int, Conduct], seed: int
) -> None:
    plain = run(push_pull(update="server", chunk_bytes=768), workers, servers, seed, conduct)
    rounds = run(bounded_staleness(0, chunk_bytes=768), workers, servers, seed, {})
    for got, expected in zip(rounds.results, plain.results, strict=True):
        for mine, theirs in zip(got, expected, strict=True):
            # In lockstep a tensor that nobody had a gradient for does not travel.
            for one, other in zip(mine, theirs, strict=True):
                assert other is None or one == other


def test_a_gradient_that_has_not_left_is_not_overwritten_by_the_next() -> None:
    """With the memory that training uses, on a link on which nothing moves for two steps."""
    model = torch.nn.Linear(30, 10, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    inventory = Inventory.of(model)
    plan = bounded_staleness(1).plan(inventory.specs, Cluster(1, 1))
    stage = Stage(plan, 0, recipe_for(sgd, inventory))
    slots = LiveTensors(plan, inventory, Staging())
    member, optimizer = stage.members[HUB], RemoteOptimizer(sgd, inventory.trained)
    settings = RoundSettings(optimizer)
    context = SendContext(settings.now)
    exchange = RoundChannel(0, plan, member, slots, context=context, limit_s=10)
    service = ShardService(1, member, limit_s=10)
    servers = ServerState(
        plan, inventory, optimizer, Transfer(member), service, 10, lambda value: [value]
    )
    updates = Synchronizer(
        model,
        plan,
        inventory,
        slots,
        (exchange,),
        lambda made: ServerUpdates(made, optimizer, servers, settings),
    )
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 30), step + 1.0)).sum().backward()
        optimizer.step()
    stage.drain()
    exchange.wait()
    updates.close()
    (server,) = stage.servers
    assert server.member.refused == 0, server.member.last_refusal


# ---- asynchronous


def as_they_came(
    simulation: Simulation, chunk: Chunk, begins_at: Sequence[int], *, by_staleness: bool = False
) -> Ledger:
    """Each gradient is an update when it comes; not before its worker's turn."""
    ledger = Ledger(simulation, chunk)
    begins = list(begins_at)
    for event, rank in ledger.events():
        if isinstance(event.body, Publish):
            while event.body.round >= len(ledger.versions) - 1:
                ledger.hollow += 1  # an update of nothing, for who has waited for its turn
                ledger.update([])
            assert event.body.round == len(ledger.versions) - 2, "not the newest"
        elif isinstance(event.body, WorkerLeft):
            begins = [0] * len(begins)
        elif isinstance(event.body, Push) and len(ledger.versions) - 1 >= begins[rank]:
            age = len(ledger.versions) - 1 - event.body.read
            rate = 1.0 / max(1, age) if by_staleness else 1.0
            ledger.update([(rank, event.body)], 1, rate)
    return ledger


def check_async(simulation: Simulation, ledgers: Sequence[Ledger]) -> None:
    for ledger in ledgers:
        ledger.check()
    check_answers(simulation)
    check_ages(simulation, ledgers)
    assert simulation.refused == 0


def steps_each(conduct: Mapping[int, Conduct], workers: int, steps: int) -> dict[int, Conduct]:
    kept = {rank: conduct.get(rank, Conduct()) for rank in range(workers)}
    return {rank: replace(each, steps=min(each.steps, steps)) for rank, each in kept.items()}


@given(
    workers=st.integers(1, 5),
    servers=st.integers(1, 3),
    by_staleness=st.booleans(),
    chunk_bytes=st.sampled_from([256, 768]),
    conduct=conducts(SLOW, AWAY, LOST, LEAVES),
    seed=SEEDS,
)
@settings(max_examples=60)
def test_every_gradient_is_applied_once_in_the_order_of_arrival(
    workers: int,
    servers: int,
    by_staleness: bool,
    chunk_bytes: int,
    conduct: dict[int, Conduct],
    seed: int,
) -> None:
    strategy = async_sgd(lr_by_staleness=by_staleness, chunk_bytes=chunk_bytes)
    own = steps_each(conduct, workers, ROUNDS)
    simulation = run(strategy, workers, servers, seed, own, rounds=10**9)
    assert [len(steps) for steps in simulation.steps] == [
        own[rank].steps for rank in range(workers)
    ]
    ledgers = [
        as_they_came(simulation, chunk, [0] * workers, by_staleness=by_staleness)
        for chunk in simulation.plan.chunks
    ]
    check_async(simulation, ledgers)
    assert all(set(ledger.applied) == gradients(simulation) for ledger in ledgers)
    assert not any(ledger.hollow for ledger in ledgers)


@given(workers=st.integers(1, 5), conduct=conducts(SLOW, AWAY), seed=SEEDS)
@settings(max_examples=60)
def test_training_ends_when_there_have_been_so_many_updates(
    workers: int, conduct: dict[int, Conduct], seed: int
) -> None:
    simulation = run(async_sgd(), workers, 1, seed, conduct, rounds=12)
    for chunk in simulation.plan.chunks:
        assert len(as_they_came(simulation, chunk, [0] * workers).applied) >= 12
    assert all(step.round < 12 for own in simulation.steps for step in own)


@given(
    workers=st.integers(2, 5),
    servers=st.integers(1, 3),
    ramp_up=st.integers(0, 20),
    conduct=conducts(SLOW, AWAY, LEAVES),
    seed=SEEDS,
)
@settings(max_examples=60)
def test_workers_join_one_after_the_other(
    workers: int, servers: int, ramp_up: int, conduct: dict[int, Conduct], seed: int
) -> None:
    strategy = async_sgd(ramp_up=ramp_up, chunk_bytes=768)
    simulation = run(strategy, workers, servers, seed, conduct, rounds=20)
    begins_at = [rank * ramp_up // workers for rank in range(workers)]
    ledgers = [as_they_came(simulation, chunk, begins_at) for chunk in simulation.plan.chunks]
    check_async(simulation, ledgers)
    assert all(ledger.hollow < workers for ledger in ledgers)
