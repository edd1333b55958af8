"""One node's half of a round: what it admits, and the exact bytes it gives back."""

import gc
import weakref
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import floats, make_plan, push, values, vector

from slipstream.codecs import Dense, Factors, Rows
from slipstream.codecs.matrices import Matrix, to_frames
from slipstream.consistency import All, Asynchronous, ByAge, Consistency, FirstOf
from slipstream.errors import FrameRefused, RuntimeFault
from slipstream.methods import Rounds
from slipstream.plan import Plan
from slipstream.routes import Everywhere, Prefer, Route
from slipstream.runtime.exchange.aggregator import Aggregator, PublishMean, Result
from slipstream.runtime.exchange.collector import Collector
from slipstream.runtime.exchange.payloads.payload import split_frames
from slipstream.strategy import Strategy
from slipstream.topologies import Sharded
from slipstream.transports.wire import Early, Push, checksum
from slipstream.types import Buffer, Chunk, Cluster, Spec, Unit, Values
from slipstream.updates import Update, UserOptimizer

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
        np.frombuffer(next(frames), np.float32) if here else None for here in result.body.counts
    ]


def holder(plan: Plan) -> Aggregator:
    return Aggregator(plan.cluster.server_nodes[0], plan, PublishMean())


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
        assert (result.body.unit, result.body.part, result.body.round) == (chunk.index, 0, 0)
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
    assert result.body.counts == [0, 1]
    absent, given_ = read(chunk, result)
    assert absent is None
    np.testing.assert_array_equal(given_, [0.5, 1.0])
    node.push(0, *push(chunk, [None, None], round_=1))
    (nothing,) = node.push(1, *push(chunk, [None, None], round_=1))
    assert (nothing.body.counts, nothing.frames) == ([0, 0], ())


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
    return msgspec.structs.replace(GOOD, **fields)


def with_frames(*frames: Buffer, counts: Sequence[int] = (1, 1)) -> tuple[Push, list[Buffer]]:
    return changed(counts=list(counts), crc=checksum(frames)), list(frames)


REFUSALS = {
    "unknown unit": (0, changed(unit=7), FRAMES),
    "no worker": (2, GOOD, FRAMES),
    "not even a node": (-1, GOOD, FRAMES),
    "bad checksum": (0, changed(crc=GOOD.crc ^ 1), FRAMES),
    "damaged byte": (0, GOOD, [bytes(8), FRAMES[1]]),
    "too few frames": (0, *with_frames(FRAMES[0])),
    "too many frames": (0, *with_frames(*FRAMES, b"")),
    "frames nobody announced": (0, *with_frames(*FRAMES, counts=[0, 1])),
    "counts for other segments": (0, *with_frames(*FRAMES, counts=[1, 1, 0])),
    "no counts": (0, *with_frames(counts=[])),
    "two frames in one place": (0, *with_frames(*FRAMES, counts=[2, 0])),
    "counts without end": (0, *with_frames(*FRAMES, counts=[1, 2**61])),
    "weights of the future": (0, changed(read=3), FRAMES),
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
        bad = msgspec.structs.replace(bad, round=2)
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
    nodes = [Aggregator(node, plan, PublishMean()) for node in plan.cluster.server_nodes]
    for chunk in plan.chunks:
        body, frames = push(chunk, [values(np.zeros(chunk.numel, np.float32))])
        (holding,) = plan.holders_of(chunk)
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
    body = Push(0, 0, 0, [1], checksum(frames))
    (result,) = holder(plan).push(0, body, frames)
    assert [memoryview(frame).nbytes for frame in result.frames] == [4]
    assert bytes(memoryview(result.frames[0])) == bytes(memoryview(frames[0]))


def test_an_updater_sees_the_mean_and_the_settings_and_its_word_is_published() -> None:
    class Doubler:
        heard: object = None

        def examine(self, settings: object) -> None:
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
    node = Aggregator(PLAN.cluster.server_nodes[0], PLAN, updater)
    body, frames = push(CHUNK, [floats(1, 2), None])
    settled = changed(counts=body.counts, crc=body.crc, settings=[{"lr": 0.5}])
    with pytest.raises(FrameRefused, match="no settings"):
        node.push(1, changed(counts=body.counts, crc=body.crc, settings=[{}]), frames)
    node.push(1, settled, frames)
    (result,) = node.push(0, settled, frames)
    np.testing.assert_array_equal(read(CHUNK, result)[0], [2, 4])
    assert result.body.counts == [1, 0]
    assert updater.heard == [{"lr": 0.5}]

    other = changed(counts=body.counts, crc=body.crc, settings=[{"lr": 9.0}], round=1)
    same = changed(counts=body.counts, crc=body.crc, settings=[{"lr": 0.5}], round=1)
    node.push(1, other, frames)
    with pytest.raises(RuntimeFault, match="different optimizer settings"):
        node.push(0, same, frames)


# ---- rounds that do not need everybody

FIRST_OF_3 = Strategy(
    "first",
    Rounds(
        Everywhere(Route(Sharded(), up=Dense())),
        Consistency(FirstOf(first=2)),
        Update(outer=UserOptimizer(at="server")),
    ),
).plan([vector("t", 2)], Cluster(3, 1))


class Sum:
    """Weights that are moved by every mean."""

    def __init__(self) -> None:
        self.weights = np.zeros(2, np.float32)
        self.rates: list[float] = []

    def examine(self, settings: object) -> None:
        """All settings are welcome."""

    def apply(
        self,
        chunk: Chunk,
        mean: Sequence[Values | None],
        settings: object,
        *,
        rate: float = 1.0,
        whole: bool = False,
    ) -> Sequence[Values | None]:
        assert whole, "who misses a round must be given all of the weights"
        self.rates.append(rate)
        if mean[0] is not None:
            self.weights += mean[0].data.view(np.float32)
        return self.current(chunk)

    def current(self, chunk: Chunk) -> Sequence[Values | None]:
        return [values(self.weights.copy())]


def test_a_round_of_the_first_ones_is_for_those_who_made_it() -> None:
    (chunk,) = FIRST_OF_3.chunks
    node = Aggregator(3, FIRST_OF_3, Sum())
    for rank in (2, 0, 1):
        assert node.push(rank, *push(chunk, [floats(rank, 1)])) == []
        assert node.collector.whole() == [(0, rank)]
    assert node.collector.whole() == []
    with pytest.raises(FrameRefused, match="a decision on round 1"):
        node.commit(1, [0, 2])
    (result,) = node.commit(0, [0, 2])
    assert (result.audience, result.body.dropped) == ((0, 2), [])
    np.testing.assert_array_equal(read(chunk, result)[0], [1, 1])
    (served,) = node.serve(1, 1)
    assert (served.audience, served.body.round, served.body.dropped) == ((1,), 0, [1])
    np.testing.assert_array_equal(read(chunk, served)[0], [1, 1])
    for round_ in (0, 2):
        with pytest.raises(FrameRefused, match=f"round {round_} is not open"):
            node.serve(round_, 1)
    assert list(node.makers) == [(0, (0, 2))]


def test_gradient_that_did_not_make_its_round_is_freed() -> None:
    (chunk,) = FIRST_OF_3.chunks
    node = Aggregator(3, FIRST_OF_3, Sum())
    late = floats(5, 5)
    memory = weakref.ref(late.data)
    for rank, gradient in ((0, floats(1, 1)), (1, late), (2, floats(1, 1))):
        node.push(rank, *push(chunk, [gradient]))
    del late, gradient
    assert memory() is not None
    node.commit(0, [0, 2])
    gc.collect()
    assert memory() is None


def test_the_rate_of_an_old_gradient_comes_down_where_that_was_asked_for() -> None:
    plan = Strategy(
        "each",
        Rounds(
            Everywhere(Route(Sharded(), up=Dense())),
            Consistency(Asynchronous(), damping=ByAge()),
            Update(outer=UserOptimizer(at="server")),
        ),
    ).plan([vector("t", 2)], Cluster(2, 1))
    (chunk,) = plan.chunks
    updater = Sum()
    node = Aggregator(2, plan, updater)
    for round_, (rank, begun) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0)]):
        body, frames = push(chunk, [floats(1, 1)], round_=begun)
        (result,) = node.push(rank, msgspec.structs.replace(body, read=begun), frames)
        assert (result.body.round, result.audience) == (round_, (rank,))
    assert updater.rates == [1.0, 1.0, 1.0, 1 / 3]
    assert node.staleness() == {"t": {0: 3, 3: 1}}


def test_results_are_sent_again_where_somebody_may_have_missed_them() -> None:
    plan = Strategy(
        "going on",
        Rounds(Everywhere(Route(Sharded(), up=Dense())), Consistency(All(without_lost=True))),
    ).plan([vector("t", 1)], Cluster(2, 1))
    (chunk,) = plan.chunks
    node = holder(plan)
    assert node.replay() == []
    for round_ in range(3):
        node.push(0, *push(chunk, [floats(1)], round_=round_))
        made = node.push(1, *push(chunk, [floats(3)], round_=round_))
        assert node.replay() == made, "the last one: nobody is further behind"
    node.push(0, *push(chunk, [floats(5)], round_=3))
    (alone,) = node.retire(1)
    assert read(chunk, alone)[0] == 5
    assert node.replay() == [alone]
    assert holder(make_plan([vector("t", 1)])).replay() == []


# ---- layers

LAYERS = [
    Spec("fc.weight", (40, 30), "float32", 0, layer="fc", form="factors"),
    Spec("fc.bias", (40,), "float32", 1, layer="fc", form="factors"),
    Spec("words.weight", (9, 30), "float32", 2, layer="words", form="rows"),
]
WHOLE = Sharded(whole_layers=True)
IN_LAYERS = Strategy(
    "layers",
    Rounds(Prefer((Route(WHOLE, up=Factors()), Route(WHOLE, up=Rows()))), chunk_bytes=2048),
).plan(LAYERS, Cluster(2, 1))
FC, WORDS = IN_LAYERS.units


def framed(*arrays: np.ndarray) -> list[Buffer]:
    frames: list[Buffer] = []
    for array in arrays:
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        frames += to_frames(Matrix(len(array), raw, array.dtype.name))
    return frames


def layer_push(unit: Unit, frames: list[Buffer], **fields: object) -> tuple[Push, list[Buffer]]:
    body = Push(unit.index, 0, 0, [len(frames)], checksum(frames))
    return msgspec.structs.replace(body, **fields), frames


def whole(results: Sequence[Result], unit: Unit) -> dict[int, np.ndarray]:
    """What results say of a unit's tensors, put together from its chunks."""
    tensors = {t: np.full(LAYERS[t].numel, np.nan, np.float32) for t in unit.tensors}
    for part, (result, chunk) in enumerate(zip(results, unit.chunks, strict=True)):
        assert (result.body.unit, result.body.part) == (unit.index, part)
        for segment, values_ in zip(chunk.segments, read(chunk, result), strict=True):
            assert values_ is not None
            tensors[segment.tensor][segment.start : segment.stop] = values_
    return {t: array.reshape(LAYERS[t].shape) for t, array in tensors.items()}


def test_factors_become_the_mean_gradient_chunk_by_chunk() -> None:
    assert len(FC.chunks) > 2
    node, random = holder(IN_LAYERS), np.random.default_rng(0)
    given_ = [
        [random.integers(-3, 4, (rows, n)).astype(np.float32) for n in (30, 40)] for rows in (2, 5)
    ]
    assert node.push(1, *layer_push(FC, framed(*given_[1]))) == []
    results = node.push(0, *layer_push(FC, framed(*given_[0])))
    got = whole(results, FC)
    np.testing.assert_array_equal(got[0], sum(dy.T @ x for x, dy in given_) / 2)
    np.testing.assert_array_equal(got[1], sum(dy.sum(0) for _, dy in given_) / 2)


def test_rows_become_the_mean_gradient_of_the_table() -> None:
    node = holder(IN_LAYERS)
    ids = [np.array([[8], [0]]), np.array([[8]])]
    rows = [np.full((2, 30), 2, np.float32), np.full((1, 30), 4, np.float32)]
    node.push(0, *layer_push(WORDS, framed(ids[0], rows[0])))
    got = whole(node.push(1, *layer_push(WORDS, framed(ids[1], rows[1]))), WORDS)
    expected = np.zeros((9, 30), np.float32)
    expected[8], expected[0] = 3, 1
    np.testing.assert_array_equal(got[2], expected)


def test_a_layer_that_some_did_not_use_and_one_that_nobody_did() -> None:
    node = holder(IN_LAYERS)
    x, dy = np.ones((1, 30), np.float32), np.ones((1, 40), np.float32)
    node.push(0, *layer_push(FC, []))
    got = whole(node.push(1, *layer_push(FC, framed(x, dy))), FC)
    assert set(got[0].flat) == set(got[1].flat) == {0.5}
    node.push(0, *layer_push(FC, [], round=1))
    results = node.push(1, *layer_push(FC, [], round=1))
    assert len(results) == len(FC.chunks)
    assert all(not any(result.body.counts) and not result.frames for result in results)


def test_inputs_that_came_early_are_part_of_the_contribution() -> None:
    node = holder(IN_LAYERS)
    x, dy = np.full((3, 30), 2, np.float32), np.ones((3, 40), np.float32)
    assert node.early(0, Early(FC.index, 0, checksum(framed(x))), framed(x)) == []
    node.push(0, *layer_push(FC, framed(dy), early=True))
    got = whole(node.push(1, *layer_push(FC, framed(x, dy))), FC)
    assert set(got[0].flat) == {6.0}
    with pytest.raises(FrameRefused, match="never sent"):
        node.push(0, *layer_push(FC, framed(dy), early=True, round=1))
    with pytest.raises(FrameRefused, match="do not leave early"):
        node.early(0, Early(WORDS.index, 0, checksum(framed(x))), framed(x))


def test_inputs_whose_round_closed_without_their_sender_are_dropped() -> None:
    route = Route(WHOLE, up=Factors())
    plan = Strategy(
        "first",
        Rounds(
            Everywhere(route),
            Consistency(FirstOf(first=1)),
            Update(outer=UserOptimizer(at="server")),
        ),
    ).plan(LAYERS[:2], Cluster(2, 1))
    (unit,) = plan.units
    collector = Collector(2, plan)
    x, dy = np.ones((1, 30), np.float32), np.ones((1, 40), np.float32)
    early = Early(unit.index, 0, checksum(framed(x)))
    collector.early(1, early, framed(x))
    collector.push(0, *layer_push(unit, framed(x, dy)))
    (closed,) = collector.commit(0, [0])
    assert closed.ranks == (0,)
    assert collector.push(1, *layer_push(unit, framed(dy), early=True)) == []
    collector.early(1, early, framed(x))  # also one that comes too late
    assert not collector._held[unit.index].early
    assert collector.round(unit.index) == 1


@pytest.mark.parametrize("sent_as", ["float32", "bfloat16"])
def test_layers_in_short_formats_are_multiplied_in_a_longer_one(sent_as: str) -> None:
    specs = [Spec("fc.weight", (4, 3), "bfloat16", 0, layer="fc", form="factors")]
    route = Route(WHOLE, up=Factors())
    plan = Strategy("short", Rounds(Everywhere(route))).plan(specs, Cluster(1, 1))
    rows = 300  # as many ones added up in bfloat16 would stay at 256
    ones = {"float32": np.ones(rows, np.float32), "bfloat16": np.full(rows, 0x3F80, np.uint16)}
    raw = ones[sent_as].view(np.uint8)
    matrices = [Matrix(rows, np.tile(raw, n), sent_as) for n in (3, 4)]
    frames: list[Buffer] = [frame for matrix in matrices for frame in to_frames(matrix)]
    (result,) = holder(plan).push(0, *layer_push(plan.units[0], frames))
    (published,) = result.frames
    assert set(np.frombuffer(published, np.uint16)) == {0x4396}  # 300


def test_frames_are_dealt_to_segments_by_their_counts() -> None:
    a, b = b"a", b"b"
    assert split_frames([4, 5, 6], [1, 0, 1], [a, b], 1) == ([a], None, [b])
    assert split_frames([4, 5], [2, 0], [a, b], 2) == ([a, b], None)
    for counts, frames in (([1], [a]), ([1, 1], [a]), ([2, 0], [a, b]), ([1, 0], [a, b])):
        with pytest.raises(FrameRefused):
            split_frames([4, 5], counts, frames, 1)
