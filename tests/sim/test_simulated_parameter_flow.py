"""Parameter Flow on virtual time: the same updates for all, and nothing lost on the way."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.codecs import Above, Dense, Filter
from slipstream.methods import Rounds
from slipstream.routes import Everywhere, Route
from slipstream.strategy import Strategy
from slipstream.systems import parameter_flow, push_pull
from slipstream.testing import Conduct, Simulation, simulate
from slipstream.testing.members import Tensors
from slipstream.topologies import Sharded, Tree
from slipstream.transports.wire import Publish, RouteUpdated, WorkerLeft
from slipstream.types import Spec

SPECS = (
    Spec("wide", (40, 33), "float32", 0, "parameter"),
    Spec("bias", (33,), "float32", 1, "parameter"),
    Spec("deep", (1100,), "float32", 2, "parameter"),
)
ROUNDS = 7
SEEDS = st.integers(0, 1 << 20)


def dyadic(seed: int, seldom: int):
    """Small multiples of a power of two: their sums are exact. Some are given seldom."""

    def contribute(rank: int, round_: int, tensor: int) -> bytes | None:
        if tensor == seldom and (rank + round_) % 3:
            return None
        numbers = np.random.default_rng((seed, rank, round_, tensor))
        whole = numbers.integers(-64, 65, SPECS[tensor].numel) * numbers.integers(
            0, 2, SPECS[tensor].numel
        )
        return (whole / 1024).astype(np.float32).tobytes()

    return contribute


@st.composite
def trees(draw: st.DrawFn, workers: int, servers: int) -> Tree | str:
    """A random tree a server; or none."""
    if draw(st.booleans()):
        return "star"
    children = []
    for _ in range(servers):
        order = draw(st.permutations(range(workers)))
        tree: list[list[int]] = [[] for _ in range(workers + 1)]
        for at, rank in enumerate(order):
            above = draw(st.integers(-1, at - 1))
            tree[0 if above < 0 else order[above] + 1].append(rank)
        children.append(tuple(map(tuple, tree)))
    return Tree(tuple(children))


def floats(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.float32).astype(np.float64)


def total(of: list[Tensors], tensor: int) -> np.ndarray:
    return sum((floats(t[tensor]) for t in of if t[tensor] is not None), np.zeros(()))


def applied(simulation: Simulation, rank: int) -> list[Tensors]:
    """What a worker's optimizer was given, in order."""
    if simulation.updates[rank]:
        return list(simulation.updates[rank])
    return [*(step.had for step in simulation.steps[rank][1:]), simulation.final[rank]]


def play(tree: Tree | str, seed: int, seldom: int, **options) -> Simulation:
    run = {key: options.pop(key) for key in ("workers", "servers", "conduct")}
    strategy = parameter_flow(tree=tree, chunk_bytes=1024, decay="constant", **options)
    return simulate(
        strategy, SPECS, rounds=ROUNDS, seed=seed, contribute=dyadic(seed, seldom), **run
    )


@given(
    data=st.data(),
    workers=st.sampled_from([2, 4]),
    servers=st.integers(1, 3),
    staleness=st.integers(0, 3),
    delta=st.sampled_from([0.0, 1 / 64, 1 / 32, "50%", "90%"]),
    codec=st.sampled_from(["float32", "bfloat16"]),
    seed=SEEDS,
    seldom=st.integers(0, 3),
)
@settings(max_examples=50, deadline=None)
def test_all_apply_the_same_and_nothing_is_lost(
    data: st.DataObject, workers: int, servers: int, staleness: int, delta, codec: str, seed: int,
    seldom: int,
) -> None:  # fmt: skip
    tree = data.draw(trees(workers, servers))
    simulation = play(
        tree, seed, seldom, workers=workers, servers=servers, staleness=staleness, delta=delta,
        broadcast_delta=delta, codec=codec, conduct={0: Conduct(speed=0.2)},
    )  # fmt: skip
    sequences = [applied(simulation, rank) for rank in range(workers)]
    assert all(len(sequence) == ROUNDS for sequence in sequences)
    assert all(sequence == sequences[0] for sequence in sequences)
    assert simulation.refused == 0
    assert simulation.max_spread <= staleness + 1
    for tensor in range(len(SPECS)):
        given_ = sum(total([s.given for s in steps], tensor) for steps in simulation.steps)
        owed = sum(owed.get(tensor, np.zeros(())) for owed in simulation.owed)
        owed_back = simulation.owed_back.get(tensor, np.zeros(()))
        arrived = total(sequences[0], tensor)
        # Workers are powers of two: the mean is exact, too.
        np.testing.assert_array_equal(workers * (arrived + owed_back) + owed, given_)


@given(workers=st.integers(2, 4), servers=st.integers(1, 2), seed=SEEDS, tree=st.data())
@settings(max_examples=15, deadline=None)
def test_without_a_bound_it_is_push_pull(
    workers: int, servers: int, seed: int, tree: st.DataObject
) -> None:
    over = tree.draw(trees(workers, servers))
    flow = simulate(
        parameter_flow(delta=0.0, tree=over, chunk_bytes=1024),
        SPECS, workers=workers, servers=servers, rounds=ROUNDS, seed=seed,
    )  # fmt: skip
    plain = simulate(
        push_pull(chunk_bytes=1024),
        SPECS, workers=workers, servers=servers, rounds=ROUNDS, seed=seed,
    )  # fmt: skip
    assert flow.results == plain.results


@given(
    data=st.data(),
    workers=st.integers(3, 5),
    servers=st.integers(1, 2),
    staleness=st.integers(0, 2),
    seed=SEEDS,
    seldom=st.integers(0, 3),
    away_at=st.floats(0.0, 2.0),
)
@settings(max_examples=50, deadline=None)
def test_a_relay_is_lost_and_nobody_misses_an_update(
    data: st.DataObject, workers: int, servers: int, staleness: int, seed: int, seldom: int,
    away_at: float,
) -> None:  # fmt: skip
    tree = data.draw(trees(workers, servers))
    lost = data.draw(st.integers(1, workers - 1))
    simulation = play(
        tree, seed, seldom, workers=workers, servers=servers, staleness=staleness, delta="50%",
        conduct={lost: Conduct(away_at=away_at, given_up=True)},
    )  # fmt: skip
    rest = [rank for rank in range(workers) if rank != lost]
    sequences = [applied(simulation, rank) for rank in rest]
    assert all(len(sequence) == ROUNDS for sequence in sequences)
    assert all(sequence == sequences[0] for sequence in sequences)
    for sequence in sequences:
        assert all(np.isfinite(floats(t)).all() for update in sequence for t in update if t)
    check_the_tree_is_used_again(simulation, lost)
    check_nothing_is_forwarded_twice(simulation)


def check_nothing_is_forwarded_twice(simulation: Simulation) -> None:
    """Servers send results again when a worker is lost; others need no second copy."""
    forwarded = Counter(
        (event.source, event.peer, event.body.unit, event.body.part, event.body.round)
        for event in simulation.trace
        if event.kind == "sent" and isinstance(event.body, Publish) and "rank" in event.source
    )
    assert set(forwarded.values()) <= {1}


def check_the_tree_is_used_again(simulation: Simulation, lost: int) -> None:
    """Once all have said that they pass on without it, a server sends to no more than it must."""
    plan = simulation.plan
    for node in plan.cluster.server_nodes:
        server, known = plan.cluster.name(node), set()
        before, sent = set(), Counter()
        for event in simulation.trace:
            if event.kind == "taken" and event.peer == server:
                if isinstance(event.body, RouteUpdated):
                    known.add(event.source)
                if isinstance(event.body, WorkerLeft):
                    known.add(server)
            elif event.kind == "sent" and event.source == server:
                if isinstance(event.body, Publish) and len(known) < plan.cluster.workers:
                    before.add((event.body.unit, event.body.round))
                elif isinstance(event.body, Publish):
                    sent[event.body.unit, event.body.round] += 1
        for (unit, round_), times in sent.items():
            if (unit, round_) in before:
                continue  # it is sent again, in case somebody has not got it
            topology = plan.route(plan.units[unit]).topology.without(lost)
            targets = set(topology.fanout(node, node, plan.cluster)) - {lost}
            assert times <= len(targets)


def test_servers_bound_of_the_root_decays_from_the_first_round_on() -> None:
    """Entry t of round t, counted from 1, is 5% above or below δ/√t; the holder's clock decides."""
    specs = [Spec("above", (ROUNDS,), "float32", 0), Spec("below", (ROUNDS,), "float32", 1)]

    def contribute(rank: int, round_: int, tensor: int) -> bytes:
        entry = np.zeros(ROUNDS, np.float32)
        entry[round_] = (0.95 if tensor else 1.05) / np.sqrt(1 + round_)
        return entry.tobytes()

    route = Route(Sharded(), up=Dense(), down=Filter(Above(1.0, decay="root")))
    strategy = Strategy("filtered down", Rounds(Everywhere(route)))
    run = simulate(strategy, specs, workers=1, servers=1, rounds=ROUNDS, contribute=contribute)
    for round_, (results,) in enumerate(run.results):
        sent = [floats(content) != 0 for content in results if content is not None]
        assert [each[round_] for each in sent] == [True, False]
