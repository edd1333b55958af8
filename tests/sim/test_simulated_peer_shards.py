"""Workers that hold shares: every contribution counts once, and all workers get the same bits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from mixes import check, everywhere, run

from slipstream import compat
from slipstream.codecs import Dense, Filter, OneBit, Quantized
from slipstream.codecs.select import Above, Drop
from slipstream.consistency import All, Asynchronous, Consistency, FirstOf, Lag, StaleSynchronous
from slipstream.errors import IncompatibleParts
from slipstream.routes import Route
from slipstream.topologies import PeerSharded
from slipstream.updates import Update, UserOptimizer

CODECS = [
    Dense(),
    Dense("bfloat16"),
    OneBit(),
    Quantized(8, block=64),
    Quantized(4, block=32, rounding="stochastic"),
    Filter(Above(Drop(0.5))),
]


@pytest.mark.parametrize("gate", [Lag(0), Lag(2)])
@pytest.mark.parametrize(("up", "down"), list(itertools.product(CODECS, CODECS)))
def test_any_codecs_up_and_down_count_everything_once(up: Any, down: Any, gate: Lag) -> None:
    route = Route(PeerSharded(), up=up, down=down)
    strategy = everywhere("peers", route, consistency=Consistency(All(), gate), chunk_bytes=4096)
    simulation = run(strategy)
    check(simulation)
    assert {node for nodes in simulation.plan.holders for node in nodes} == {0, 1, 2}


def test_the_holder_applies_what_it_sent_and_keeps_what_rounding_lost() -> None:
    """With a lossy way down the results of all workers are equal, and not what was summed."""
    route = Route(PeerSharded(), down=Quantized(4, block=32))
    simulation = run(everywhere("peers", route))
    assert any(np.abs(owed).max() > 0 for owed in simulation.owed_back.values())
    for by_rank in simulation.results:
        assert len(set(by_rank)) == 1


@pytest.mark.parametrize(
    ("consistency", "update", "said"),
    [
        (Consistency(), Update(outer=UserOptimizer(at="server")), "has no optimizer for it"),
        (Consistency(FirstOf(2)), Update(), "count the gradients of all workers"),
        (Consistency(StaleSynchronous()), Update(), "count the gradients of all workers"),
        (Consistency(Asynchronous()), Update(), "count the gradients of all workers"),
        (Consistency(All(without_lost=True)), Update(), "is lost with it"),
    ],
)
def test_what_needs_a_server_is_refused(consistency: Any, update: Update, said: str) -> None:
    strategy = everywhere("x", Route(PeerSharded()), consistency=consistency, update=update)
    with pytest.raises(IncompatibleParts, match=f"{said}.*; use .*Sharded"):
        compat.check(strategy)
