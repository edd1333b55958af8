"""A worker that leaves before the others, where servers update: nothing is refused or missed."""

import pytest
from mixes import DENSE, sgd, whole_numbers

from slipstream.codecs import Dense
from slipstream.consistency import All, Consistency, Lag, StaleSynchronous
from slipstream.methods import Rounds
from slipstream.routes import Everywhere, Route
from slipstream.strategy import Strategy
from slipstream.testing import Conduct, Simulation, simulate
from slipstream.topologies import Sharded, Tree
from slipstream.updates import Update, UserOptimizer

ROUNDS = 6
CHAIN = ((0,), (1,), (2,), (3,), ())  # the server to rank 0, rank 0 to rank 1, ...
WIDE = ((2,), (), (), (0, 1, 3), ())  # rank 2 forwards to all others
TREES = {"chain": CHAIN, "wide": WIDE, "flat": ((3, 2, 1, 0), (), (), (), ())}


def play(
    topology: Sharded | Tree,
    admit: All | StaleSynchronous,
    conduct: dict[int, Conduct],
    seed: int = 3,
) -> Simulation:
    strategy = Strategy(
        "leaving",
        Rounds(
            Everywhere(Route(topology, up=Dense())),
            Consistency(admit, Lag(2)),
            Update(outer=UserOptimizer(at="server")),
            chunk_bytes=2048,
        ),
    )
    return simulate(
        strategy,
        DENSE,
        workers=4,
        servers=1,
        rounds=ROUNDS,
        seed=seed,
        contribute=whole_numbers(DENSE, seed),
        conduct=conduct,
        optimizer=sgd(DENSE),
    )


@pytest.mark.parametrize("admit", [StaleSynchronous(), All()], ids=["fold", "all"])
@pytest.mark.parametrize("leaves", range(4))
@pytest.mark.parametrize("tree", [*TREES, None])
def test_the_others_go_on_and_nothing_is_refused(
    tree: str | None, leaves: int, admit: All | StaleSynchronous
) -> None:
    topology = Sharded() if tree is None else Tree((TREES[tree],))
    simulation = play(topology, admit, {leaves: Conduct(steps=2)})
    assert simulation.refused == 0
    for rank, steps in enumerate(simulation.steps):
        assert len(steps) == (2 if rank == leaves else ROUNDS)
    stayed = [final for rank, final in enumerate(simulation.final) if rank != leaves]
    assert all(final == simulation.held for final in stayed)


@pytest.mark.parametrize("admit", [StaleSynchronous(without_lost=True), All(without_lost=True)])
@pytest.mark.parametrize("tree", [*TREES, None])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("away_at", [0.05, 0.1, 0.2, 0.3])
def test_the_others_go_on_when_one_is_lost(
    tree: str | None, admit: All | StaleSynchronous, seed: int, away_at: float
) -> None:
    topology = Sharded() if tree is None else Tree((TREES[tree],))
    simulation = play(topology, admit, {2: Conduct(away_at=away_at, given_up=True)}, seed)
    assert simulation.refused <= len(simulation.plan.units)  # what the lost one had sent
    stayed = [0, 1, 3]
    assert all(len(simulation.steps[rank]) == ROUNDS for rank in stayed)
    assert all(simulation.final[rank] == simulation.held for rank in stayed)
