"""Bounds on what may wait: nothing is lost, bounds move as they should, and squeezing is safe."""

import math
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import floats, values

from slipstream._native import bounded_nbytes, mean_into
from slipstream.codecs import Above, Drop, Filter
from slipstream.codecs.filter import HEADER, SQUEEZE_CODES
from slipstream.codecs.residual import Residual
from slipstream.errors import ConfigError, FrameRefused
from slipstream.types import Buffer, EncodeContext, Spec, Values

Array = np.ndarray[Any, Any]
needs_cramjam = pytest.mark.skipif(
    find_spec("cramjam") is None, reason="squeezing needs cramjam: pip install cramjam"
)
PRECISIONS = ["float32", "bfloat16"]
METHODS = [pytest.param(method, marks=needs_cramjam) for method in SQUEEZE_CODES]
precisions = pytest.mark.parametrize("precision", PRECISIONS)
squeezes = pytest.mark.parametrize("squeeze", [None, *METHODS])
methods = pytest.mark.parametrize("method", METHODS)
SEEDS = st.integers(0, 2**32 - 1)


def bounded(
    delta: Any,
    *,
    decay: Any = "rate",
    congested: Any = None,
    values: Any = "float32",
    squeeze: Any = None,
) -> Filter:
    """Entries above a bound travel."""
    return Filter(Above(delta, decay, congested), values, squeeze)


def sent(codec: Filter, update: Array, memory: Array, hop: EncodeContext) -> Array:
    """What arrives at the other end, after the checks that are made there."""
    frames = [
        bytes(memoryview(frame)) for frame in codec.encode(values(update), Residual(memory), hop)
    ]
    codec.examine(frames, update.size, "float32")
    out = Values.empty(update.size, "float32")
    out.data[:] = 0x5A
    codec.decode_into(frames, out)
    return out.data.view(np.float32)


def same_bits(one: Array, other: Array) -> bool:
    """But for the sign of a zero, and which NaN it is."""
    one, other = (
        np.where(np.isnan(x), np.float32(np.nan), x + np.float32(0)) for x in (one, other)
    )
    return one.tobytes() == other.tobytes()


def wild(random: np.random.Generator, count: int) -> Array:
    """Sizes from 2⁻³⁰ to 2³⁰, and in one update of four something that is no number."""
    update = random.normal(size=count) * 2.0 ** random.integers(-30, 30, count)
    if random.random() < 0.25:
        update[random.random(count) < 0.1] = random.choice([np.nan, np.inf, -np.inf])
    return update.astype(np.float32)


# ---- nothing is lost


@precisions
@squeezes
@settings(max_examples=150)  # for each of eight recipes
@given(count=st.integers(0, 300), steps=st.integers(1, 6), seed=SEEDS)
def test_what_is_sent_and_what_is_owed_is_all_there_was_bit_for_bit(
    precision: Any, squeeze: Any, count: int, steps: int, seed: int
) -> None:
    codec = bounded(1.0, values=precision, squeeze=squeeze)
    random = np.random.default_rng(seed)
    memory = codec.init(count, "float32").values
    for clock in range(1, steps + 1):
        update, rate = wild(random, count), float(2.0 ** random.integers(-35, 35))
        with np.errstate(invalid="ignore", over="ignore"):
            acc = memory + update
        arrived = sent(codec, update, memory, EncodeContext(clock, rate))
        assert same_bits(arrived + memory, acc)
        assert np.isfinite(memory).all()
        np.testing.assert_array_equal(np.isfinite(arrived), np.isfinite(acc))
        stayed = np.abs(acc) <= rate
        assert not arrived[stayed].any()
        assert same_bits(memory[stayed], acc[stayed])
        if precision == "float32":
            assert not memory[~stayed].any()


@precisions
@squeezes
@settings(max_examples=150)  # for each of eight recipes
@given(
    count=st.integers(1, 200),
    rates=st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.4, 1.0]), min_size=2, max_size=8),
    seed=SEEDS,
)
@example(count=200, rates=[1.0, 0.0], seed=0)
def test_over_dyadic_numbers_the_totals_are_equal(
    precision: Any, squeeze: Any, count: int, rates: list[float], seed: int
) -> None:
    """Small multiples of 2⁻⁶: every sum is exact, so there is no rounding to hide a loss."""
    codec = bounded(8.0, values=precision, squeeze=squeeze)
    random = np.random.default_rng(seed)
    memory = codec.init(count, "float32").values
    given_, arrived = np.zeros(count), np.zeros(count)
    for clock, rate in enumerate(rates, 1):
        update = (random.integers(-512, 513, count) / 64).astype(np.float32)
        given_ += update
        arrived += sent(codec, update, memory, EncodeContext(clock, rate))
        np.testing.assert_array_equal(arrived + memory, given_)


@given(
    delta=st.floats(0, 10),
    decay=st.sampled_from(["rate", "root", "constant"]),
    rate=st.floats(0, 2),
    clock=st.integers(1, 10**6),
    seed=SEEDS,
)
def test_what_is_owed_is_bounded(
    delta: float, decay: Any, rate: float, clock: int, seed: int
) -> None:
    codec, hop = bounded(delta, decay=decay), EncodeContext(clock, rate)
    random = np.random.default_rng(seed)
    update = (random.normal(size=500) * random.uniform(0.01, 10)).astype(np.float32)
    memory = codec.init(500, "float32").values
    bound = codec.select.threshold(values(update), memory, hop)
    sent(codec, update, memory, hop)
    assert np.abs(memory.astype(np.float64)).max() <= bound
    assert np.linalg.norm(memory.astype(np.float64)) <= bound * math.sqrt(500)


@precisions
@given(seed=SEEDS)
def test_without_a_bound_everything_but_zeros_travels(precision: Any, seed: int) -> None:
    codec = bounded(0.0, values=precision)
    random = np.random.default_rng(seed)
    update = (random.normal(size=200) * (random.random(200) < 0.5)).astype(np.float32)
    memory = codec.init(200, "float32").values
    (frame,) = codec.encode(values(update), Residual(memory), EncodeContext())
    assert HEADER.unpack_from(frame)[3] == np.count_nonzero(update)
    assert (np.abs(memory) <= np.abs(update) * 2.0**-8).all()
    if precision == "float32":
        assert not memory.any()


def test_what_waits_travels_when_it_has_grown() -> None:
    codec, memory = bounded(1.0), np.zeros(3, np.float32)
    first = sent(codec, np.float32([0.75, 2.0, -0.5]), memory, EncodeContext())
    assert first.tolist() == [0, 2, 0]
    assert memory.tolist() == [0.75, 0, -0.5]
    second = sent(codec, np.float32([0.75, 1.0, -0.5]), memory, EncodeContext())
    assert second.tolist() == [1.5, 0, 0]
    assert memory.tolist() == [0, 1, -1]


def test_a_round_that_is_not_finite_is_seen_and_then_forgotten() -> None:
    codec, memory = bounded(10.0), np.zeros(4, np.float32)
    first = sent(codec, np.float32([np.nan, np.inf, -np.inf, 1]), memory, EncodeContext())
    np.testing.assert_array_equal(first, np.float32([np.nan, np.inf, -np.inf, 0]))
    assert memory.tolist() == [0, 0, 0, 1]


# ---- the bound


def test_the_bound_follows_the_learning_rate_the_clock_or_nothing() -> None:
    update, memory, hop = floats(1.0), np.zeros(1, np.float32), EncodeContext(clock=16, rate=0.1)
    assert bounded(2.0).select.threshold(update, memory, hop) == 0.2
    assert bounded(2.0, decay="root").select.threshold(update, memory, hop) == 0.5
    assert bounded(2.0, decay="constant").select.threshold(update, memory, hop) == 2.0


@pytest.mark.parametrize(
    ("codec", "wide", "congested"),
    [
        (bounded(2.0, congested=4.0), 1.0, 2.0),
        (bounded(2.0), 1.0, 1.0),
        (bounded(2.0, congested=0.0), 1.0, 0.0),
        (bounded(2.0, congested=Drop(0.75)), 1.0, 3.0),
        (bounded(Drop(0.5), congested=Drop(0.75), decay="root"), 2.0, 3.0),
        (bounded(Drop(0.5), congested=5.0), 2.0, 2.5),
    ],
)
def test_a_link_that_lacks_bandwidth_has_a_bound_of_its_own(
    codec: Filter, wide: float, congested: float
) -> None:
    update, memory = floats(1, 2, -3, 4), np.zeros(4, np.float32)
    assert codec.select.threshold(update, memory, EncodeContext(7, 0.5)) == wide
    busy = EncodeContext(7, 0.5, congested=True)
    assert codec.select.threshold(update, memory, busy) == congested


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.8, 0.97])
@pytest.mark.parametrize("count", [10, 1000, 5000, 100_000])
@pytest.mark.parametrize("clock", [1, 2, 1001])
def test_the_share_that_was_asked_for_is_dropped(ratio: float, count: int, clock: int) -> None:
    random = np.random.default_rng(count)
    update = random.standard_cauchy(count).astype(np.float32)
    memory = random.normal(size=count).astype(np.float32)
    arrived = sent(bounded(Drop(ratio)), update, memory, EncodeContext(clock))
    dropped = count - np.count_nonzero(arrived)
    if count <= 4096:  # all of them are looked at
        assert dropped == math.floor(ratio * count)
    else:
        assert abs(dropped / count - ratio) <= 0.02


def test_the_share_is_that_of_what_is_owed_too() -> None:
    memory = np.arange(100, dtype=np.float32)
    assert Drop(0.5).bound(values(np.zeros(100, np.float32)), memory, 1) == 49


@pytest.mark.parametrize("columns", [128, 256, 1000, 1024])
def test_a_matrix_with_large_columns_is_sampled_fairly(columns: int) -> None:
    """Every fourth column is a thousand times the others: a look down one would see one kind."""
    random = np.random.default_rng(0)
    matrix = random.normal(size=(2**20 // columns, columns)).astype(np.float32)
    matrix[:, ::4] *= 1000
    for clock in range(1, 6):
        memory = np.zeros(matrix.size, np.float32)
        arrived = sent(bounded(Drop(0.8)), matrix.reshape(-1), memory, EncodeContext(clock))
        assert abs(1 - np.count_nonzero(arrived) / matrix.size - 0.8) <= 0.03


def test_the_sample_moves_with_the_clock() -> None:
    update = values(np.random.default_rng(0).normal(size=100_000).astype(np.float32))
    memory = np.zeros(100_000, np.float32)
    bounds = {Drop(0.5).bound(update, memory, clock) for clock in range(1, 11)}
    assert len(bounds) == 10


def test_where_most_are_zeros_all_others_travel() -> None:
    update = np.zeros(1000, np.float32)
    update[::10] = np.linspace(0.001, 1, 100)
    arrived = sent(bounded(Drop(0.8)), update, np.zeros(1000, np.float32), EncodeContext())
    np.testing.assert_array_equal(arrived, update)


def test_entries_that_are_all_alike_do_not_wait_for_ever() -> None:
    codec, memory = bounded(Drop(0.8)), np.zeros(100, np.float32)
    arrived = sent(codec, np.full(100, -0.5, np.float32), memory, EncodeContext())
    assert arrived.tolist() == [-0.5] * 100


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_a_sample_that_is_not_finite_does_not_make_the_bound_so(bad: float, share: float) -> None:
    update = np.linspace(1, 2, 1000, dtype=np.float32)
    update[: int(share * 1000)] = bad
    memory = np.zeros(1000, np.float32)
    arrived = sent(bounded(Drop(0.5)), update, memory, EncodeContext())
    np.testing.assert_array_equal(np.isfinite(arrived), np.isfinite(update))
    assert np.isfinite(memory).all()


def test_a_sample_without_a_number_has_no_bound() -> None:
    update = np.tile(np.float32([np.inf, np.nan]), 50)
    assert Drop(0.5).bound(values(update), np.zeros(100, np.float32), 1) == 0


# ---- what arrives


@precisions
@squeezes
@given(
    count=st.integers(0, 2500),
    terms=st.integers(1, 5),
    divisor=st.sampled_from([1.0, 2.0, 3.0, -7.5]),
    seed=SEEDS,
)
def test_combining_is_the_mean_of_what_arrived(
    precision: Any, squeeze: Any, count: int, terms: int, divisor: float, seed: int
) -> None:
    """The very bytes of ``mean_into``."""
    random = np.random.default_rng(seed)
    codec = bounded(float(2.0 ** random.integers(-30, 30)), values=precision, squeeze=squeeze)
    contributions: list[Sequence[Buffer]] = []
    arrived = []
    for _ in range(terms):
        update = wild(random, count)
        frames = codec.encode(values(update), codec.init(count, "float32"), EncodeContext())
        contributions.append([bytes(memoryview(frame)) for frame in frames])
        arrived.append(sent(codec, update, codec.init(count, "float32").values, EncodeContext()))
    expected, out = np.empty(count, np.float32), Values.empty(count, "float32")
    mean_into(expected, arrived, "float32", divisor)
    codec.combine(contributions, out, divisor=divisor)
    assert out.data.tobytes() == expected.tobytes()


def test_additions_keep_the_order_of_the_list() -> None:
    """In float32, 1e8 swallows a 1 that is added to it but not one added after it cancels."""
    codec, out = bounded(0.5), Values.empty(40, "float32")
    big, one, minus = (
        codec.encode(values(np.full(40, v, np.float32)), codec.init(40, "float32"), EncodeContext())
        for v in (1e8, 1, -1e8)
    )
    codec.combine([big, one, minus], out, divisor=1.0)
    assert out.data.view(np.float32).tolist() == [0.0] * 40
    codec.combine([big, minus, one], out, divisor=1.0)
    assert out.data.view(np.float32).tolist() == [1.0] * 40


# ---- squeezing


def squeezable(count: int) -> Values:
    """Few different values: a body of much repetition."""
    return values(np.tile(np.float32([2, 2, 0, 3]), count // 4))


def squeezed(method: Any, count: int = 400) -> tuple[Filter, bytes]:
    codec = bounded(1.0, squeeze=method)
    (frame,) = codec.encode(squeezable(count), codec.init(count, "float32"), EncodeContext())
    return codec, bytes(memoryview(frame))


@methods
def test_a_body_that_repeats_itself_gets_shorter_and_comes_back(method: Any) -> None:
    codec, frame = squeezed(method)
    (plain,) = bounded(1.0).encode(squeezable(400), Residual.zeros(400), EncodeContext())
    assert len(frame) < memoryview(plain).nbytes / 4
    assert frame[2] == SQUEEZE_CODES[method]
    codec.examine([frame], 400, "float32")
    out = Values.empty(400, "float32")
    codec.decode_into([frame], out)
    np.testing.assert_array_equal(out.data, squeezable(400).data)


@methods
def test_what_would_not_get_shorter_travels_as_it_is(method: Any) -> None:
    noise = values(np.random.default_rng(0).normal(size=40).astype(np.float32))
    (frame,) = bounded(0.0, squeeze=method).encode(noise, Residual.zeros(40), EncodeContext())
    (plain,) = bounded(0.0).encode(noise, Residual.zeros(40), EncodeContext())
    assert bytes(memoryview(frame)) == bytes(memoryview(plain))


def refused(codec: Filter, frame: bytes, numel: int, reason: str = ".") -> None:
    with pytest.raises(FrameRefused, match=reason):
        codec.examine([frame], numel, "float32")


def with_body_bytes(frame: bytes, nbytes: int) -> bytes:
    return frame[:8] + nbytes.to_bytes(4, "little") + frame[12:]


@methods
def test_a_body_that_is_not_of_the_size_it_says_is_refused(method: Any) -> None:
    codec, frame = squeezed(method)
    says = HEADER.unpack_from(frame)[4]
    for nbytes in (0, 1, says - 1, says + 1, says + 100):
        refused(codec, with_body_bytes(frame, nbytes), 400)


def compressed(method: Any, body: bytes) -> bytes:
    cramjam = pytest.importorskip("cramjam")
    compress = {
        "snappy": cramjam.snappy.compress_raw,
        "lz4": cramjam.lz4.compress_block,
        "zstd": cramjam.zstd.compress,
    }[method]
    return bytes(compress(body))


@methods
def test_a_body_that_ends_early_is_not_filled_up_with_what_was_in_memory(method: Any) -> None:
    codec = bounded(0.0, squeeze=method)
    header = HEADER.pack(1, 1, SQUEEZE_CODES[method], 400, 1600)  # dense
    codec.examine([header + compressed(method, bytes(1600))], 400, "float32")
    for nbytes in (0, 4, 1596, 1599):
        refused(codec, header + compressed(method, bytes(nbytes)), 400)


@methods
def test_a_bomb_is_refused_before_it_is_opened(method: Any) -> None:
    """Ten megabytes of zeros in few bytes; what it says decides, and then it must be true."""
    size = 10_000_000
    bomb = compressed(method, bytes(size))
    codec, frame = squeezed(method)
    most = bounded_nbytes(400, "float32") - HEADER.size
    honest = with_body_bytes(frame[: HEADER.size], size) + bomb
    refused(codec, honest, 400, f"unsqueezes to {size} bytes; 400 values take {most}")
    for lie in (1, 1000, most):
        refused(codec, with_body_bytes(honest, lie), 400)


@methods
def test_a_squeezed_frame_cut_anywhere_is_refused(method: Any) -> None:
    codec, frame = squeezed(method)
    for length in range(len(frame)):
        refused(codec, frame[:length], 400)


@precisions
@squeezes
@settings(max_examples=150)
@given(
    changes=st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 255)), min_size=1, max_size=5)
)
def test_changed_frames_are_refused_or_decoded(
    precision: Any, squeeze: Any, changes: list[tuple[int, int]]
) -> None:
    codec = bounded(1.0, values=precision, squeeze=squeeze)
    (encoded,) = codec.encode(squeezable(400), codec.init(400, "float32"), EncodeContext())
    frame = bytearray(memoryview(encoded))
    for place, byte in changes:
        frame[place % len(frame)] = byte
    try:
        codec.examine([frame], 400, "float32")
    except FrameRefused:
        return
    codec.decode_into([frame], Values.empty(400, "float32"))


def test_frames_of_another_recipe_are_refused() -> None:
    memory = Residual.zeros(4)
    (frame,) = bounded(1.0, values="bfloat16").encode(floats(1, 2, 3, 4), memory, EncodeContext())
    refused(bounded(1.0), bytes(memoryview(frame)), 4, "values of type code 2: expected float32")
    (plain,) = bounded(1.0).encode(floats(1, 2, 3, 4), memory, EncodeContext())
    marked = bytearray(memoryview(plain))
    marked[2] = 3
    refused(bounded(1.0), bytes(marked), 4, "squeezed by method 3 where None")
    refused(bounded(1.0, squeeze="snappy"), bytes(marked), 4, "squeezed by method 3 where snappy")
    refused(bounded(1.0), bytes(11), 4, "11 bytes where a header alone takes 12")
    refused(bounded(1.0), bytes(memoryview(plain)), 3, "more values than there are|for 3 values")


# ---- recipes


@pytest.mark.parametrize("bound", [-1.0, math.nan, math.inf, -math.inf, "0.5", None, 1j])
def test_a_bound_that_is_none_is_refused_with_what_to_give(bound: Any) -> None:
    with pytest.raises(ConfigError, match=r"delta=.*: give a bound .* or .* Drop\(0\.8\)"):
        bounded(bound)
    if bound is not None:
        with pytest.raises(ConfigError, match=r"congested=.*: give a bound"):
            bounded(1.0, congested=bound)


@pytest.mark.parametrize("ratio", [-0.1, 1, 1.5, math.nan, math.inf, "0.5", None])
def test_a_share_that_is_none_is_refused_with_what_to_give(ratio: Any) -> None:
    with pytest.raises(ConfigError, match=r"Drop\(ratio=.*at least 0 and less than 1"):
        Drop(ratio)


@pytest.mark.parametrize(
    ("field", "known"),
    [
        ("decay", "rate, root, constant"),
        ("values", "float32, bfloat16"),
        ("squeeze", "snappy, lz4, zstd, None"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(field: str, known: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}='nonsense': choose one of {known}"):
        bounded(1.0, **{field: "nonsense"})  # type: ignore[arg-type]


def test_names_tell_what_travels() -> None:
    assert bounded(1.0).name == "filter"
    assert bounded(Drop(0.5), values="bfloat16", squeeze="lz4").name == "filter-bfloat16-lz4"


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "int64"])
def test_other_dtypes_are_refused_with_the_way_out(dtype: str) -> None:
    told = bounded(1.0).obstacle(Spec("w", (2, 2), dtype, 0))
    assert told.startswith(f"it is {dtype}, ")
    assert told.endswith("route it to Dense()")


def test_without_the_library_squeezing_is_refused_before_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cramjam", None)  # as if it were not installed
    spec = Spec("w", (2, 2), "float32", 0)
    assert bounded(1.0).obstacle(spec) == ""
    told = bounded(1.0, squeeze="zstd").obstacle(spec)
    assert "squeeze='zstd' needs cramjam" in told
    assert "pip install cramjam" in told


# ---- what else selects, and what comes back


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_the_mean_of_many_is_held_to_a_bound_that_much_smaller(workers: int) -> None:
    update, memory = floats(1.0), np.zeros(1, np.float32)
    ctx = EncodeContext(clock=1, workers=workers)
    assert Above(2.0, of_mean=True).threshold(update, memory, ctx) == 2.0 / math.sqrt(workers)
    assert Above(2.0).threshold(update, memory, ctx) == 2.0
    share = Above(Drop(0.5), of_mean=True).threshold(floats(1, 2, 3, 4), np.zeros(4), ctx)
    assert share == 2.0, "a share is one of what there is"


@precisions
@squeezes
@settings(max_examples=60)
@given(count=st.integers(0, 200), seed=SEEDS)
def test_what_was_dropped_returns_to_the_residual(
    precision: Any, squeeze: Any, count: int, seed: int
) -> None:
    """Small multiples of 2⁻⁶: every sum is exact."""
    codec = bounded(2.0, values=precision, squeeze=squeeze, decay="constant")
    random = np.random.default_rng(seed)
    memory = codec.init(count, "float32").values
    given_ = np.zeros(count)
    for clock in range(1, 4):
        update = (random.integers(-512, 513, count) / 64).astype(np.float32)
        given_ += update
        frames = codec.encode(values(update), Residual(memory), EncodeContext(clock))
        Residual(memory).put_back(codec, [bytes(memoryview(frame)) for frame in frames])
        np.testing.assert_array_equal(memory, given_)
