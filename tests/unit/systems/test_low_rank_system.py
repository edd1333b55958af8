"""Which tensors travel in low rank, and what members make of frames that do not fit."""

from typing import Any

import numpy as np
import pytest

from slipstream.codecs import Dense, LowRank
from slipstream.errors import ConfigError, FrameRefused, RuntimeFault
from slipstream.methods import Rounds
from slipstream.routes import Everywhere, Route
from slipstream.runtime.exchange.aggregator import Aggregator, PublishMean
from slipstream.runtime.exchange.payloads import payload_of
from slipstream.schedules import WaitFree
from slipstream.strategy import Strategy
from slipstream.systems import low_rank, parse
from slipstream.topologies import Mesh, Sharded
from slipstream.transports.wire import Push, checksum
from slipstream.types import Cluster, Spec, Values

ROUTES = [
    (Spec("linear", (32, 32), "float32", 0), True),
    (Spec("convolution", (16, 8, 3, 3), "float32", 0), True),
    (Spec("one row", (1, 1024), "float32", 0), False),
    (Spec("few columns", (1024, 4), "float32", 0), False),
    (Spec("too many rows", (1 << 20, 64), "float32", 0), False),
    (Spec("small", (31, 33), "float32", 0), False),
    (Spec("bias", (4096,), "float32", 0), False),
    (Spec("buffer", (64, 64), "float32", 0, "buffer"), False),
    (Spec("half", (64, 64), "bfloat16", 0), False),
]


@pytest.mark.parametrize(("spec", "low"), ROUTES, ids=[spec.name for spec, _ in ROUTES])
@pytest.mark.parametrize("peers", [False, True])
def test_large_fp32_matrices_that_become_smaller_travel_in_low_rank(
    spec: Spec, low: bool, peers: bool
) -> None:
    (route,) = low_rank(peers=peers).plan([spec], Cluster(2, 0 if peers else 1)).routes
    up = LowRank(4) if low else Dense()
    assert (route.up, route.down) == (up, Dense() if peers else up)
    assert route.topology == (Mesh() if peers else Sharded())


def test_workers_update_and_layers_leave_as_they_are_done() -> None:
    strategy = parse("low_rank(rank=2, seed=3)")
    assert (strategy.name, strategy.rounds.schedule) == ("low_rank", WaitFree())
    assert not strategy.rounds.update.holder_applies
    assert strategy == low_rank(rank=2, seed=3)


@pytest.mark.parametrize("text", ["rank=0", "rank=2.5", "rank='4'", "peers=1", "seed=-1"])
def test_values_that_make_no_sense_are_refused_at_once(text: str) -> None:
    with pytest.raises(ConfigError, match=text.split("=")[0]):
        parse(f"low_rank({text})")


# ---- a server with one matrix, and one worker

SHAPE = (8, 20)
CODEC = LowRank(2)
SPECS = [Spec("w", SHAPE, "float32", 0)]


def plan_with(down: Any) -> Any:
    strategy = Strategy("low", Rounds(Everywhere(Route(Sharded(), CODEC, down)), chunk_bytes=256))
    return strategy.plan(SPECS, Cluster(1, 1))


def pushed(frames: list[bytes], round_: int = 0, counts: list[int] | None = None) -> Any:
    return Push(0, round_, 0, counts or [len(frames)], checksum(frames)), frames


def encoded(round_codec: Any) -> list[bytes]:
    ones = Values(np.ones(160, np.float32).view(np.uint8), "float32")
    frames = round_codec.encode(ones, CODEC.init(160, "float32"))
    return [bytes(memoryview(frame)) for frame in frames]


BAD = {
    "dense": [bytes(4 * 160)],
    "empty": [b""],
    "the other side's": [bytes(8 + 4 * 2 * 20)],
    "too many": [bytes(72), bytes(72)],
    "no side": [b"\7" + bytes(71)],
}


@pytest.mark.parametrize("trouble", BAD)
def test_bad_frames_are_refused_and_change_nothing(trouble: str) -> None:
    node = Aggregator(1, plan_with(CODEC), PublishMean())
    worker = CODEC.agree(SHAPE)
    for round_ in range(3):
        with pytest.raises(FrameRefused):
            node.push(0, *pushed(BAD[trouble], round_))
        frames = encoded(worker.at(round_))
        (result,) = node.push(0, *pushed(frames, round_))
        assert [bytes(memoryview(frame)) for frame in result.frames] == frames
        worker.learn(round_, frames[0])


def test_a_gradient_in_another_basis_ends_the_job() -> None:
    """It has the right size, so only its checksum shows that workers have come apart."""
    node = Aggregator(1, plan_with(CODEC), PublishMean())
    with pytest.raises(RuntimeFault, match="another basis"):
        node.push(0, *pushed(encoded(LowRank(2, seed=9).agree(SHAPE).at(0))))


@pytest.mark.parametrize("down", [CODEC, Dense()])
def test_workers_refuse_results_that_lack_something(down: Any) -> None:
    plan = plan_with(down)
    (unit,) = plan.units
    results = Aggregator(1, plan, PublishMean()).push(0, *pushed(encoded(CODEC.agree(SHAPE).at(0))))
    assert len(results) == (1 if down == CODEC else 3)
    payload = payload_of(plan, unit)
    for result in results:
        payload.examine_answer(result.body, result.frames)
        with pytest.raises(FrameRefused):
            payload.examine_answer(result.body, result.frames[:-1])
        with pytest.raises(FrameRefused):
            payload.examine_answer(result.body, [*result.frames, bytes(4)])
    first = results[0]
    with pytest.raises(FrameRefused):
        payload.examine_answer(first.body, [*first.frames[:-1], bytes(71)])
