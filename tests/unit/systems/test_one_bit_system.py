"""Which tensors travel in one bit, and what a server makes of frames that do not fit."""

import numpy as np
import pytest
from samples import make_plan, vector

from slipstream.codecs import Dense, OneBit
from slipstream.errors import FrameRefused
from slipstream.routes import Links
from slipstream.runtime.exchange.aggregator import Aggregator, PublishMean
from slipstream.schedules import WaitFree
from slipstream.systems import one_bit
from slipstream.topologies import Sharded
from slipstream.transports.wire import Push, checksum
from slipstream.types import Buffer, Chunk, Cluster, Spec, Values

ROUTES = [
    (Spec("linear", (32, 32), "float32", 0), True),
    (Spec("convolution", (16, 8, 3, 3), "float32", 0), True),
    (Spec("one row", (1, 1024), "float32", 0), True),
    (Spec("small", (31, 33), "float32", 0), False),
    (Spec("bias", (4096,), "float32", 0), False),
    (Spec("scalar", (), "float32", 0), False),
    (Spec("buffer", (64, 64), "float32", 0, "buffer"), False),
    (Spec("double", (64, 64), "float64", 0), False),
    (Spec("half", (64, 64), "bfloat16", 0), False),
]


@pytest.mark.parametrize(("spec", "in_bits"), ROUTES, ids=[spec.name for spec, _ in ROUTES])
def test_large_fp32_weights_travel_in_bits_both_ways_the_rest_dense(
    spec: Spec, in_bits: bool
) -> None:
    (route,) = one_bit().plan([spec], Cluster(2, 1)).routes
    codec = OneBit() if in_bits else Dense()
    assert (route.up, route.down) == (codec, codec)
    assert (route.topology, route.over) == (Sharded(), Links())
    assert route.scheme == ("one-bit/sharded" if in_bits else "dense/sharded")


def test_workers_update_and_layers_leave_as_they_are_done() -> None:
    strategy = one_bit(chunk_bytes=4096)
    assert (strategy.name, strategy.rounds.schedule) == ("one_bit", WaitFree())
    assert not strategy.rounds.update.holder_applies
    plan = strategy.plan([spec for spec, _ in ROUTES], Cluster(3, 2))
    assert {plan.route(unit).scheme for unit in plan.units} == {
        "one-bit/sharded",
        "dense/sharded",
    }
    assert max(chunk.nbytes for chunk in plan.chunks) <= 4096


def test_few_biases_do_not_limit_the_servers() -> None:
    specs = [Spec("weight", (64, 64), "float32", 0), Spec("bias", (64,), "float32", 1)]
    plan = one_bit(chunk_bytes=4096).plan(specs, Cluster(2, 4))
    assert all(plan.held_by(node) for node in plan.cluster.server_nodes)


# ---- a server with one chunk of two tensors, and one worker

PLAN = make_plan([vector("a", 10), vector("b", 20, order=1)], workers=1, codec=OneBit())
(CHUNK,) = PLAN.chunks


def framed(chunk: Chunk, number: float, memories: list[np.ndarray]) -> list[Buffer]:
    frames: list[Buffer] = []
    for segment, memory in zip(chunk.segments, memories, strict=True):
        content = np.linspace(-1, number, segment.numel, dtype=np.float32)
        frames.extend(OneBit().encode(Values(content.view(np.uint8), "float32"), memory))
    return frames


def pushed(frames: list[Buffer], round_: int = 0) -> tuple[Push, list[Buffer]]:
    return Push(CHUNK.index, round_, 0, [1, 1], checksum(frames)), frames


def fresh() -> list[np.ndarray]:
    return [OneBit().init(segment.numel, "float32") for segment in CHUNK.segments]


BAD = {
    "dense": lambda frames: [bytes(4 * segment.numel) for segment in CHUNK.segments],
    "scales alone": lambda frames: [bytes(memoryview(frame))[:8] for frame in frames],
    "a byte short": lambda frames: [frames[0], bytes(memoryview(frames[1]))[:-1]],
    "a byte long": lambda frames: [bytes(memoryview(frames[0])) + b"\0", frames[1]],
    "empty": lambda frames: [b"", b""],
    "swapped": lambda frames: frames[::-1],
    "too few": lambda frames: frames[:1],
}


@pytest.mark.parametrize("trouble", BAD)
def test_bad_frames_are_refused_and_change_nothing(trouble: str) -> None:
    node, untroubled = (Aggregator(1, PLAN, PublishMean()) for _ in range(2))
    memories = fresh()
    for round_ in range(3):
        frames = framed(CHUNK, 1.0 + round_, memories)
        with pytest.raises(FrameRefused):
            node.push(0, *pushed(BAD[trouble](frames), round_))
        (got,) = node.push(0, *pushed(frames, round_))
        (expected,) = untroubled.push(0, *pushed(frames, round_))
        assert [bytes(memoryview(f)) for f in got.frames] == [
            bytes(memoryview(f)) for f in expected.frames
        ]


def test_the_server_owes_what_it_does_not_publish() -> None:
    node = Aggregator(1, PLAN, PublishMean())
    memories = fresh()
    given, published = np.zeros(20), np.zeros(20)
    for round_ in range(40):
        frames = framed(CHUNK, 1.0 + round_ % 3, memories)
        (result,) = node.push(0, *pushed(frames, round_))
        for total, frame in ((given, frames[0]), (published, result.frames[0])):
            out = Values.empty(20, "float32")
            OneBit().decode_into([frame], out)
            total += out.data.view(np.float32)
    assert np.abs(given - published).max() < 4  # one residual, however many rounds
