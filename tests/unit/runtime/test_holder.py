"""One node's half of a round: what it admits, and the exact bytes it gives back."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import floats, make_plan, push, values, vector

from slipstream.codecs import Dense
from slipstream.errors import FrameRefused, RuntimeFault
from slipstream.runtime.holder import Holder, PublishMean, Result
from slipstream.strategy import Plan
from slipstream.transports.wire import Push, checksum
from slipstream.types import Buffer, Chunk, Values

# Two tensors in one chunk, cut so that the first also reaches into the next chunk.
WEIGHT, BIAS = vector("weight", 1500, order=0), vector("bias", 500, order=1)


def mean_of(arrays: Sequence[np.ndarray], divisor: int) -> np.ndarray:
    """In the order given, in float32, divided once."""
    total = arrays[0].copy()
    for term in arrays[1:]:
        total += term
    return total / np.float32(divisor)


def gradients(workers: int, numel: int, seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    # Scales far apart: adding in another order gives other bits.
    scale = 10.0 ** generator.integers(-3, 4, size=(workers, numel))
    return list((generator.normal(size=(workers, numel)) * scale).astype(np.float32))


def parts(chunk: Chunk, tensors: dict[int, np.ndarray | None]) -> list[Values | None]:
    """A worker's contribution to a chunk, segment by segment."""
    found: list[Values | None] = []
    for segment in chunk.segments:
        array = tensors[segment.tensor]
        found.append(None if array is None else values(array[segment.start : segment.stop]))
    return found


def read(chunk: Chunk, result: Result) -> list[np.ndarray | None]:
    frames = iter(result.frames)
    return [
        np.frombuffer(next(frames), np.float32) if here else None for here in result.body.present
    ]


def holder(plan: Plan) -> Holder:
    return Holder(plan.cluster.server_nodes[0], plan, PublishMean())


@given(st.integers(1, 5), st.data(), st.integers(0, 1000))
def test_the_mean_is_the_same_bits_whatever_the_order_of_arrival(
    workers: int, data: st.DataObject, seed: int
) -> None:
    plan = make_plan([WEIGHT, BIAS], workers=workers, chunk_bytes=4096)
    assert len(plan.chunks) == 2
    node = holder(plan)
    weights, biases = gradients(workers, 1500, seed), gradients(workers, 500, seed + 1)
    for chunk in plan.chunks:
        order = data.draw(st.permutations(range(workers)), label=f"chunk {chunk.index}")
        results: list[Result] = []
        for nth, rank in enumerate(order):
            tensors: dict[int, np.ndarray | None] = {0: weights[rank], 1: biases[rank]}
            results = node.push(rank, *push(chunk, parts(chunk, tensors)))
            assert len(results) == (nth == workers - 1)
        (result,) = results
        assert (result.body.chunk, result.body.round) == (chunk.index, 0)
        assert result.body.crc == checksum(result.frames)
        for segment, got in zip(chunk.segments, read(chunk, result), strict=True):
            expected = mean_of((weights, biases)[segment.tensor], workers)
            np.testing.assert_array_equal(got, expected[segment.start : segment.stop])


@pytest.mark.parametrize(("role", "divisor"), [("parameter", 3), ("buffer", 2)])
def test_an_absent_parameter_counts_zero_and_an_absent_buffer_not_at_all(
    role: str, divisor: int
) -> None:
    plan = make_plan([vector("t", 2, role=role)], workers=3)
    (chunk,) = plan.chunks
    node = holder(plan)
    node.push(2, *push(chunk, [floats(1e8, 1.0)]))
    node.push(1, *push(chunk, [None]))
    (result,) = node.push(0, *push(chunk, [floats(0.5, 2.0)]))
    expected = mean_of([np.float32([0.5, 2.0]), np.float32([1e8, 1.0])], divisor)
    np.testing.assert_array_equal(read(chunk, result)[0], expected)


def test_what_nobody_contributed_to_is_absent_from_the_result() -> None:
    plan = make_plan([vector("a", 2, order=0), vector("b", 3, order=1)], workers=2)
    (chunk,) = plan.chunks  # b comes first: backward order
    node = holder(plan)
    node.push(0, *push(chunk, [None, floats(1, 2)]))
    (result,) = node.push(1, *push(chunk, [None, None]))
    assert result.body.present == b"\0\1"
    absent, given_ = read(chunk, result)
    assert absent is None
    np.testing.assert_array_equal(given_, [0.5, 1.0])
    node.push(0, *push(chunk, [None, None], round_=1))
    (nothing,) = node.push(1, *push(chunk, [None, None], round_=1))
    assert (nothing.body.present, nothing.frames) == (b"\0\0", ())


def test_a_contribution_to_the_next_round_waits_its_turn() -> None:
    plan = make_plan([vector("t", 1)], workers=2)
    (chunk,) = plan.chunks
    node = holder(plan)
    assert node.push(0, *push(chunk, [floats(1)])) == []
    assert node.push(0, *push(chunk, [floats(30)], round_=1, step=1)) == []
    (first,) = node.push(1, *push(chunk, [floats(3)]))
    assert (first.body.round, read(chunk, first)[0]) == (0, 2.0)
    (second,) = node.push(1, *push(chunk, [floats(50)], round_=1, step=1))
    assert (second.body.round, read(chunk, second)[0]) == (1, 40.0)


def test_rounds_of_different_chunks_are_independent() -> None:
    plan = make_plan([WEIGHT, BIAS], workers=1, chunk_bytes=4096)
    node = holder(plan)
    first, second = plan.chunks
    zeros: dict[int, np.ndarray | None] = {0: np.zeros(1500, np.float32), 1: None}
    for round_ in range(3):
        (result,) = node.push(0, *push(first, parts(first, zeros), round_=round_))
        assert result.body.round == round_
    (result,) = node.push(0, *push(second, parts(second, zeros)))
    assert result.body.round == 0


PLAN = make_plan([vector("a", 4, order=0), vector("b", 2, order=1)], workers=2, servers=1)
(CHUNK,) = PLAN.chunks
GOOD, FRAMES = push(CHUNK, [floats(1, 2), floats(1, 2, 3, 4)])


def changed(**fields: object) -> Push:
    kept = {name: getattr(GOOD, name) for name in GOOD.__struct_fields__}
    return Push(**{**kept, **fields})


def with_frames(*frames: Buffer, present: bytes = b"\1\1") -> tuple[Push, list[Buffer]]:
    return changed(present=present, crc=checksum(frames)), list(frames)


REFUSALS = {
    "unknown chunk": (0, changed(chunk=7), FRAMES),
    "no worker": (2, GOOD, FRAMES),
    "not even a node": (-1, GOOD, FRAMES),
    "bad checksum": (0, changed(crc=GOOD.crc ^ 1), FRAMES),
    "damaged byte": (0, GOOD, [bytes(8), FRAMES[1]]),
    "too few frames": (0, *with_frames(FRAMES[0])),
    "too many frames": (0, *with_frames(*FRAMES, b"")),
    "frames nobody announced": (0, *with_frames(*FRAMES, present=b"\0\1")),
    "marks for other segments": (0, *with_frames(*FRAMES, present=b"\1\1\0")),
    "no marks": (0, *with_frames(present=b"")),
    "marks that count double": (0, *with_frames(*FRAMES, present=b"\2\0")),
    "short frame": (0, *with_frames(bytes(7), FRAMES[1])),
    "long frame": (0, *with_frames(bytes(12), FRAMES[1])),
    "frames swapped": (0, *with_frames(FRAMES[1], FRAMES[0])),
    "round long closed": (0, changed(round=0), FRAMES),
    "round far ahead": (0, changed(round=4), FRAMES),
}


@pytest.mark.parametrize("trouble", REFUSALS)
@pytest.mark.parametrize("arrived", [0, 1])
def test_what_does_not_fit_is_refused_and_leaves_the_round_as_it_was(
    trouble: str, arrived: int
) -> None:
    node = holder(PLAN)
    for round_ in range(2):  # rounds 0 and 1 are closed: round 2 is open
        for rank in range(2):
            node.push(rank, *push(CHUNK, [floats(0, 0), None], round_=round_))
    body, frames = push(CHUNK, [floats(10, 20), floats(1, 2, 3, 4)], round_=2)
    if arrived:
        node.push(1, body, frames)
    rank, bad, bad_frames = REFUSALS[trouble]
    if "round" not in trouble:
        bad = Push(bad.chunk, 2, bad.step, bad.present, bad.crc)
    with pytest.raises(FrameRefused):
        node.push(rank, bad, bad_frames)
    if not arrived:
        assert node.push(1, body, frames) == []
    (result,) = node.push(0, *push(CHUNK, [floats(0, 0), None], round_=2))
    assert result.body.round == 2
    b, a = read(CHUNK, result)
    np.testing.assert_array_equal(b, [5, 10])
    np.testing.assert_array_equal(a, [0.5, 1, 1.5, 2])


@pytest.mark.parametrize("round_", [0, 1])
def test_a_second_contribution_is_refused_and_the_first_counts(round_: int) -> None:
    node = holder(PLAN)
    node.push(0, *push(CHUNK, [floats(1, 1), None], round_=round_))
    with pytest.raises(FrameRefused, match="rank 0 contributed twice"):
        node.push(0, *push(CHUNK, [floats(9, 9), None], round_=round_))
    if round_:
        node.push(0, *push(CHUNK, [None, None]))
        node.push(1, *push(CHUNK, [None, None]))
    (result,) = node.push(1, *push(CHUNK, [floats(3, 3), None], round_=round_))
    np.testing.assert_array_equal(read(CHUNK, result)[0], [2, 2])


def test_a_node_holds_only_its_own_chunks() -> None:
    plan = make_plan([vector("t", 4096)], workers=1, servers=2, chunk_bytes=8192)
    nodes = [Holder(node, plan, PublishMean()) for node in plan.cluster.server_nodes]
    for chunk in plan.chunks:
        body, frames = push(chunk, [values(np.zeros(chunk.numel, np.float32))])
        (holding,) = plan.holders[chunk.index]
        for node, taker in zip(plan.cluster.server_nodes, nodes, strict=True):
            if node == holding:
                assert len(taker.push(0, body, frames)) == 1
            else:
                with pytest.raises(FrameRefused, match="is not held here"):
                    taker.push(0, body, frames)


def test_workers_out_of_step_are_named() -> None:
    plan = make_plan([vector("t", 1)], workers=3)
    (chunk,) = plan.chunks
    node = holder(plan)
    node.push(0, *push(chunk, [floats(1)], step=4))
    node.push(2, *push(chunk, [floats(1)], step=5))
    with pytest.raises(
        RuntimeFault,
        match=r"rank 0 at step 4, rank 1 at step 4, rank 2 at step 5; .*job\.accumulate",
    ) as raised:
        node.push(1, *push(chunk, [floats(1)], step=4))
    assert not isinstance(raised.value, FrameRefused)


def test_results_are_published_in_the_wire_format() -> None:
    plan = make_plan([vector("t", 2)], workers=1, codec=Dense("bfloat16"))
    frames = Dense("bfloat16").encode(floats(1.0, 1.0 / 3))
    body = Push(0, 0, 0, b"\1", checksum(frames))
    (result,) = holder(plan).push(0, body, frames)
    assert [memoryview(frame).nbytes for frame in result.frames] == [4]
    assert bytes(memoryview(result.frames[0])) == bytes(memoryview(frames[0]))


def test_an_updater_sees_the_mean_and_the_settings_and_its_word_is_published() -> None:
    class Doubler:
        heard: object = None

        def examine(self, chunk: Chunk, settings: object) -> None:
            if settings == [{}]:
                raise FrameRefused("no settings")

        def apply(
            self,
            chunk: Chunk,
            mean: Sequence[Values | None],
            settings: object,
            *,
            rate: float = 1.0,
            whole: bool = False,
        ) -> Sequence[Values | None]:
            self.heard = settings
            assert mean[0] is not None
            return [values(2 * mean[0].data.view(np.float32)), mean[1]]

        def current(self, chunk: Chunk) -> Sequence[Values | None]:
            raise AssertionError("in lockstep only what has changed is published")

    updater = Doubler()
    node = Holder(PLAN.cluster.server_nodes[0], PLAN, updater)
    body, frames = push(CHUNK, [floats(1, 2), None])
    settled = changed(present=body.present, crc=body.crc, settings=[{"lr": 0.5}])
    with pytest.raises(FrameRefused, match="no settings"):
        node.push(1, changed(present=body.present, crc=body.crc, settings=[{}]), frames)
    node.push(1, settled, frames)
    (result,) = node.push(0, settled, frames)
    np.testing.assert_array_equal(read(CHUNK, result)[0], [2, 4])
    assert result.body.present == b"\1\0"
    assert updater.heard == [{"lr": 0.5}]

    other = changed(present=body.present, crc=body.crc, settings=[{"lr": 9.0}], round=1)
    same = changed(present=body.present, crc=body.crc, settings=[{"lr": 0.5}], round=1)
    node.push(1, other, frames)
    with pytest.raises(RuntimeFault, match="different optimizer settings"):
        node.push(0, same, frames)
