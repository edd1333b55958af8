"""Low rank in whole simulated jobs: over every road, late workers included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mixes import check, sgd

from slipstream.codecs import Dense, LowRank, Quantized
from slipstream.consistency import All, Consistency, FirstOf, Lag
from slipstream.errors import IncompatibleRoute
from slipstream.methods import Rounds
from slipstream.routes import ByTensor, Everywhere, Large, Prefer, Route, Rule
from slipstream.strategy import Strategy
from slipstream.systems import low_rank
from slipstream.testing import Conduct, simulate
from slipstream.topologies import Mesh, Sharded, Tree
from slipstream.types import Cluster, Spec
from slipstream.updates import Update, UserOptimizer

SPECS = (
    Spec("conv.weight", (32, 8, 3, 3), "float32", 0),
    Spec("conv.bias", (32,), "float32", 1),
    Spec("fc.weight", (40, 64), "float32", 2),
)
RANK = LowRank(3)
AT_HOLDER = Update(outer=UserOptimizer(at="server"))
TREE = Tree((((1,), (2,), (0,), ()), ((0, 2), (1,), (), ())))


def preferring(route: Route, **fields: Any) -> Strategy:
    # Small chunks: results of one tensor come back in several messages.
    return Strategy(
        "low", Rounds(Prefer((route, Route(route.topology))), chunk_bytes=4096, **fields)
    )


ROADS = {
    "servers, both ways": preferring(Route(Sharded(), RANK, RANK)),
    "servers, up only": preferring(Route(Sharded(), RANK)),
    "8 bits back": preferring(Route(Sharded(), RANK, Quantized(8))),
    "mesh": preferring(Route(Mesh(), RANK)),
    "tree": preferring(Route(TREE, RANK, RANK)),
    "running ahead": preferring(
        Route(Sharded(), RANK, RANK), consistency=Consistency(All(), Lag(2))
    ),
    "running ahead on a mesh": preferring(
        Route(Mesh(), RANK), consistency=Consistency(All(), Lag(1))
    ),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("seed", range(3))
def test_all_workers_have_the_same_bits_and_nothing_is_lost(road: str, seed: int) -> None:
    strategy = ROADS[road]
    servers = 0 if "mesh" in road else 2
    run = simulate(strategy, SPECS, workers=3, servers=servers, rounds=6, seed=seed, slow=1)
    check(run)
    assert any(route.up == RANK for route in run.plan.routes)


def test_every_road_gives_the_same_bits() -> None:
    """All learn the same from a round, so that all have the same basis in the next one."""
    roads = ("servers, both ways", "servers, up only", "mesh", "tree")
    results = [
        simulate(
            ROADS[road], SPECS, workers=3, servers=0 if road == "mesh" else 2, rounds=5
        ).results
        for road in roads
    ]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_of_a_late_worker_returns_and_counts(seed: int) -> None:
    strategy = preferring(
        Route(Sharded(), RANK), consistency=Consistency(FirstOf(2)), update=AT_HOLDER
    )
    run = simulate(
        strategy,
        SPECS,
        workers=3,
        servers=2,
        rounds=8,
        seed=seed,
        conduct={1: Conduct(speed=0.1)},
        optimizer=sgd(SPECS),
    )
    check(run)
    assert len(run.steps[1]) < 8, "nobody was late"


def test_servers_that_update_tell_workers_the_basis() -> None:
    route = Route(Sharded(), RANK)
    for consistency in (Consistency(), Consistency(All(), Lag(2))):
        strategy = preferring(route, consistency=consistency, update=AT_HOLDER)
        run = simulate(
            strategy, SPECS, workers=3, servers=2, rounds=6, slow=2, optimizer=sgd(SPECS)
        )
        check(run)


def test_a_gradient_that_is_not_finite_is_seen_by_all_and_forgotten() -> None:
    def contribute(rank: int, round_: int, tensor: int) -> bytes:
        given = np.random.default_rng((rank, round_, tensor)).normal(size=SPECS[tensor].numel)
        if (rank, round_, tensor) == (1, 2, 2):
            given[7] = np.inf
        return given.astype(np.float32).tobytes()

    run = simulate(
        ROADS["servers, both ways"], SPECS, workers=3, servers=2, rounds=6, contribute=contribute
    )
    finite = [
        [np.isfinite(np.frombuffer(by_rank[rank][2] or b"", np.float32)).all() for rank in range(3)]
        for by_rank in run.results
    ]
    assert finite == [[True] * 3, [True] * 3, [False] * 3, *[[True] * 3] * 3]
    assert all(np.isfinite(owed[2]).all() for owed in run.owed)
    assert len(set(run.final)) == 1


def test_a_tensor_that_is_not_always_used_keeps_all_in_step() -> None:
    def contribute(rank: int, round_: int, tensor: int) -> bytes | None:
        if tensor == 2 and (round_ == 1 or (rank + round_) % 3 == 0):
            return None
        given = np.random.default_rng((rank, round_, tensor)).normal(size=SPECS[tensor].numel)
        return given.astype(np.float32).tobytes()

    for road in ("servers, both ways", "servers, up only", "mesh", "running ahead"):
        servers = 0 if road == "mesh" else 2
        run = simulate(
            ROADS[road], SPECS, workers=3, servers=servers, rounds=7, contribute=contribute
        )
        check(run)


def test_bytes_are_those_of_the_factors_both_ways() -> None:
    spec = Spec("fc.weight", (48, 80), "float32", 0)
    run = simulate(low_rank(rank=2), [spec], workers=2, servers=1, rounds=4)
    one_way = 2 * (8 + 4 * 2 * 48) + 2 * (8 + 4 * 2 * 80)
    assert [sent.total() for sent in run.sent] == [one_way] * 2
    assert [received.total() for received in run.received] == [one_way] * 2


def test_a_large_tensor_is_one_contribution_and_many_messages_back() -> None:
    big = Spec("fc.weight", (256, 256), "float32", 0)
    plan = preferring(Route(Sharded(), RANK)).plan([big, SPECS[1]], Cluster(2, 2))
    (unit,) = [unit for unit in plan.units if unit.tensors == (0,)]
    assert len(unit.chunks) == 64
    assert [(s.start, s.stop) for s in unit.places] == [(0, 256 * 256)]
    assert len({plan.holders_of(chunk) for chunk in unit.chunks}) == 1


def test_vectors_and_full_matrices_must_go_another_way() -> None:
    everywhere = Strategy("low", Rounds(Everywhere(Route(Sharded(), LowRank(40), Dense()))))
    with pytest.raises(IncompatibleRoute, match=r"'fc.weight' cannot travel .* choose rank=24"):
        everywhere.plan(SPECS[2:], Cluster(2, 2))
    with pytest.raises(IncompatibleRoute, match=r"'conv.bias' .* route it to Dense\(\)"):
        everywhere.plan(SPECS[1:2], Cluster(2, 2))
    by_tensor = ByTensor((Rule(Large(1024, dims=2), Route(Sharded(), RANK)),), Route(Sharded()))
    plan = Strategy("low", Rounds(by_tensor)).plan(SPECS, Cluster(2, 2))
    assert [plan.routes[r].up.name for r in plan.route_of] == ["rank-3", "dense", "rank-3"]
