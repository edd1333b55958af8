"""A filter with rounds of the first N: what is dropped returns to its worker's residual."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulated_backup_workers import AWAY, SEEDS, SLOW, conducts

from slipstream.codecs import Above, Drop, Filter, OneBit, SegmentCodec
from slipstream.consistency import Consistency, FirstOf
from slipstream.methods import Rounds
from slipstream.routes import Everywhere, Route
from slipstream.strategy import Strategy
from slipstream.testing import Conduct, Simulation, simulate
from slipstream.topologies import Sharded
from slipstream.types import OptimizerRecipe, Spec
from slipstream.updates import Update, UserOptimizer

SPECS = [Spec("wide", (40, 30), "float32", 0), Spec("deep", (1100,), "float32", 1)]
SGD = OptimizerRecipe("SGD", [{"lr": 1.0, "momentum": 0.0}], [0, 0])
FIRST = 2  # a power of two: means are exact


def dyadic(seed: int):
    """Small multiples of a power of two: their sums are exact."""

    def contribute(rank: int, round_: int, tensor: int) -> bytes:
        numbers = np.random.default_rng((seed, rank, round_, tensor))
        return (numbers.integers(-64, 65, SPECS[tensor].numel) / 64).astype(np.float32).tobytes()

    return contribute


def play(codec: SegmentCodec, workers: int, seed: int, conduct: dict[int, Conduct]) -> Simulation:
    strategy = Strategy(
        "filtered",
        Rounds(
            Everywhere(Route(Sharded(), up=codec)),
            Consistency(FirstOf(first=FIRST)),
            Update(outer=UserOptimizer(at="server")),
            chunk_bytes=1024,
        ),
    )
    return simulate(
        strategy,
        SPECS,
        workers=workers,
        servers=2,
        rounds=6,
        seed=seed,
        contribute=dyadic(seed),
        conduct=conduct,
        optimizer=SGD,
    )


def given_by_all(simulation: Simulation, tensor: int) -> np.ndarray:
    contents = [step.given[tensor] for steps in simulation.steps for step in steps]
    return sum((floats(c) for c in contents if c is not None), np.zeros(SPECS[tensor].numel))


def floats(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.float32).astype(np.float64)


def counted_and_owed(simulation: Simulation, tensor: int) -> np.ndarray:
    owed = sum(each[tensor].astype(np.float64) for each in simulation.owed)
    final = simulation.final[0][tensor]
    assert final is not None
    return owed - FIRST * floats(final)


@given(
    workers=st.integers(2, 5),
    select=st.sampled_from([Above(0.5, "constant"), Above(Drop(0.8)), Above(4.0, "constant")]),
    conduct=conducts(SLOW, AWAY),
    seed=SEEDS,
)
@settings(max_examples=40)
def test_nothing_that_was_dropped_is_lost(
    workers: int, select: Above, conduct: dict[int, Conduct], seed: int
) -> None:
    simulation = play(Filter(select), workers, seed, conduct)
    assert simulation.refused == 0
    for tensor in range(len(SPECS)):
        np.testing.assert_array_equal(
            counted_and_owed(simulation, tensor), given_by_all(simulation, tensor)
        )


@pytest.mark.parametrize("codec", [Filter(Above(0.5, "constant")), OneBit()])
def test_some_are_dropped_and_come_back_in_later_rounds(codec: SegmentCodec) -> None:
    simulation = play(codec, 3, 4, {2: Conduct(speed=0.2)})
    assert simulation.figures[0].dropped.get(2, 0) > 0
    for tensor in range(len(SPECS)):
        got, wanted = counted_and_owed(simulation, tensor), given_by_all(simulation, tensor)
        np.testing.assert_allclose(got, wanted, atol=1e-3)
