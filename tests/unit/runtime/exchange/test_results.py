"""Where results go: gradients that nobody gave are zero, weights that did not come stay."""

import numpy as np
import pytest
from samples import make_plan, vector

from slipstream.plan import Plan
from slipstream.runtime.exchange.results import ResultWriter
from slipstream.runtime.exchange.unit_state import Answer, fresh
from slipstream.testing.members import ByteSlots
from slipstream.transports.wire import Publish, checksum


def written(plan: Plan) -> list[float]:
    """A tensor of sevens in two units, of which only the first has a result."""
    slots = ByteSlots(plan.specs)
    slots.begin([np.full(2048, 7, np.float32).tobytes()])
    writer = ResultWriter(plan, slots, None)
    content = np.full(1024, 6, np.float32).tobytes()
    for unit, (counts, frames) in zip(plan.units, (([1], [content]), ([0], [])), strict=True):
        body = Publish(unit.index, 0, 0, counts, checksum(frames))
        answer = Answer(0, {0: (body, frames)})
        writer.write(fresh(unit, plan), answer)
    writer.finish(0)
    return np.unique(np.frombuffer(slots.contents()[0], np.float32)).tolist()


@pytest.mark.parametrize(("at_holder", "left"), [(False, [0.0, 6.0]), (True, [6.0, 7.0])])
def test_half_a_result(at_holder: bool, left: list[float]) -> None:
    plan = make_plan([vector("w", 2048)], chunk_bytes=4096, at_holder=at_holder)
    assert written(plan) == left
