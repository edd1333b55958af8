"""Local steps with rounds of the first N: a late worker's blocks count in a later round."""

from __future__ import annotations

import numpy as np
import pytest
from mixes import sgd

from slipstream.codecs import Above, Filter, Quantized, SegmentCodec
from slipstream.consistency import Consistency, FirstOf
from slipstream.methods import Rounds
from slipstream.routes import Everywhere, Route
from slipstream.schedules import AfterBackward
from slipstream.strategy import Strategy
from slipstream.testing import Conduct, simulate
from slipstream.topologies import Sharded
from slipstream.types import Spec
from slipstream.updates import LocalSteps, Nesterov, Update

SPECS = (Spec("wide", (40, 30), "float32", 0), Spec("deep", (1100,), "float32", 1))
ROUNDS = 12


@pytest.mark.parametrize("codec", [Filter(Above(0.0, decay="constant")), Quantized(bits=8)])
def test_equal_outer_gradients_move_weights_by_one_of_them_a_round(codec: SegmentCodec) -> None:
    """A mean over blocks does not depend on how many blocks a contribution is the sum of."""
    strategy = Strategy(
        "late blocks",
        Rounds(
            Everywhere(Route(Sharded(), up=codec)),
            Consistency(FirstOf(first=2)),
            Update(LocalSteps(4), Nesterov(lr=1.0, momentum=0.0, at="server")),
            AfterBackward(),
            chunk_bytes=1024,
        ),
    )
    ones = [np.ones(spec.numel, np.float32) for spec in SPECS]
    run = simulate(
        strategy,
        SPECS,
        workers=3,
        servers=2,
        rounds=ROUNDS,
        seed=4,
        contribute=lambda rank, round_, tensor: ones[tensor].tobytes(),
        conduct={2: Conduct(speed=0.3)},
        optimizer=sgd(SPECS),
    )
    assert run.refused == 0
    assert run.figures[0].dropped.get(2, 0) > 0
    for tensor, content in enumerate(run.held):
        assert content is not None
        moved = np.abs(np.frombuffer(content, np.float32))
        np.testing.assert_allclose(moved, ROUNDS * ones[tensor], rtol=1e-5)
