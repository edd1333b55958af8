"""Factors and rows on the wire: what is taken, what is refused, and what is made of it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.codecs import Factors, Rows, matrices
from slipstream.codecs.matrices import (
    BYTES,
    DTYPES,
    HEADER,
    Matrix,
    Scratch,
    Wanted,
    frame_sizes,
    frames_taken,
    matrix_nbytes,
    quantize,
    to_frames,
)
from slipstream.codecs.quantized import FEW_BITS
from slipstream.errors import ConfigError, FrameRefused
from slipstream.types import ITEM_BYTES, LARGEST_CHUNK_BYTES, Layer, Spec, Values

LINEAR = Layer("fc", "factors", outputs=3, inputs=5, weight=0, bias=1, dtype="float32")
TABLE = Layer("words", "rows", outputs=7, inputs=5, weight=0, bias=None, dtype="float32")
WIRES: list[Any] = ["same", "bfloat16", "float32"]
FEW: list[Any] = ["int8", "int4"]
COUNTS = st.integers(0, 40)
PRECISIONS = st.sampled_from(sorted(ITEM_BYTES))


def zeros(rows: int, width: int, dtype: str) -> list[bytes]:
    matrix = Matrix(rows, np.zeros(rows * width * BYTES[dtype], np.uint8), dtype)
    return [bytes(memoryview(frame)) for frame in to_frames(matrix)]


def factors(rows: int, first: str = "float32", second: str = "float32") -> list[bytes]:
    return zeros(rows, 5, first) + zeros(rows, 3, second)


def of_ids(ids: list[int], dtype: str = "float32") -> list[bytes]:
    own = Matrix(len(ids), np.array(ids, np.int64).view(np.uint8), "int64")
    return [bytes(memoryview(f)) for f in to_frames(own)] + zeros(len(ids), 5, dtype)


# ---- what is taken


@given(rows=COUNTS, first=PRECISIONS, second=PRECISIONS)
def test_two_whole_matrices_are_taken(rows: int, first: str, second: str) -> None:
    Factors().examine(factors(rows, first, second), LINEAR)


@given(ids=st.lists(st.integers(0, 6), max_size=30), dtype=PRECISIONS)
def test_rows_of_the_table_are_taken(ids: list[int], dtype: str) -> None:
    Rows().examine(of_ids(ids, dtype), TABLE)


@given(rows=st.integers(1, 40), dtype=PRECISIONS)
def test_inputs_are_taken_early(rows: int, dtype: str) -> None:
    Factors().examine_early(zeros(rows, 5, dtype), LINEAR)


def test_a_row_larger_than_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "LARGEST_CHUNK_BYTES", 8)
    frames = factors(2)
    assert [len(frame) for frame in frames] == [16, 8, 8, 8, 8, 8, 16, 8, 8, 8]
    Factors().examine(frames, LINEAR)
    ids = of_ids([3, 4])
    assert [len(frame) for frame in ids] == [16, 8, 8, 16, 8, 8, 8, 8, 8]
    Rows().examine(ids, TABLE)
    ids[2] = np.array([7], np.int64).tobytes()
    with pytest.raises(FrameRefused, match="ids outside of a table of 7 rows"):
        Rows().examine(ids, TABLE)


@given(nbytes=st.integers(0, 5 * LARGEST_CHUNK_BYTES))
def test_frames_are_never_too_large(nbytes: int) -> None:
    sizes = frame_sizes(nbytes)
    assert sum(sizes) == nbytes
    assert all(0 < size <= LARGEST_CHUNK_BYTES for size in sizes)
    assert len(sizes) == -(-nbytes // LARGEST_CHUNK_BYTES)


def test_a_matrix_travels_in_its_own_memory() -> None:
    data = np.arange(40, dtype=np.uint8)
    header, frame = to_frames(Matrix(2, data, "float32"))
    assert HEADER.unpack(header) == (2, DTYPES.index("float32"))
    assert np.shares_memory(np.frombuffer(frame, np.uint8), data)


# ---- what is refused


@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30).filter(
        lambda ids: min(ids) < 0 or max(ids) >= 7
    )
)
def test_other_rows_are_refused(ids: list[int]) -> None:
    with pytest.raises(FrameRefused, match="ids outside of a table of 7 rows"):
        Rows().examine(of_ids(ids), TABLE)


HEADERS = st.builds(HEADER.pack, st.integers(0, 2**64 - 1), st.integers(0, 255))
SMALL_HEADERS = st.builds(HEADER.pack, st.integers(0, 12), st.integers(0, 6))


@given(
    table=st.booleans(),
    early=st.booleans(),
    frames=st.lists(HEADERS | SMALL_HEADERS | st.binary(max_size=200), max_size=6),
)
def test_anything_is_taken_or_refused(table: bool, early: bool, frames: list[bytes]) -> None:
    """Nothing else is raised, and what is taken has the size of its rows."""
    codec, layer = (Rows(), TABLE) if table else (Factors(), LINEAR)
    try:
        (codec.examine_early if early else codec.examine)(frames, layer)
    except FrameRefused:
        return
    rest, rows = frames, []
    for width in ((1, 5) if table else (5, 3))[: 1 if early else 2]:
        count, dtype, used = frames_taken(rest, Wanted(width))
        assert sum(map(len, rest[1:used])) == matrix_nbytes(count * width, dtype)
        rows.append(count)
        rest = rest[used:]
    assert not rest
    assert len(set(rows)) == 1


@pytest.mark.parametrize("change", ["fewer", "more", "longer", "another cut", "other rows"])
def test_wrong_frames(change: str) -> None:
    frames = factors(4)
    if change == "fewer":
        frames.pop()
    elif change == "more":
        frames.append(b"")
    elif change == "longer":
        frames[1] += bytes(4)
    elif change == "another cut":
        frames = [frames[0], frames[1][:4], frames[1][4:], *frames[2:]]
    else:
        frames = zeros(4, 5, "float32") + zeros(5, 3, "float32")
    with pytest.raises(FrameRefused):
        Factors().examine(frames, LINEAR)


def header(rows: int, code: int) -> bytes:
    return HEADER.pack(rows, code)


HOSTILE = {
    "nothing": [],
    "a header cut off": [header(4, 1)[:-1], bytes(80)],
    "a header too long": [header(4, 1) + b"\0", bytes(80)],
    "more rows than memory has": [header(2**64 - 1, 1), bytes(80), *factors(4)[2:]],
    "rows that wrap around": [header(2**62, 1), *factors(4)[1:]],
    "an unknown dtype": [header(4, 200), *factors(4)[1:]],
    "no dtype": [header(0, 0), header(0, 0)],
    "ids where values are": [header(4, DTYPES.index("int64")), bytes(160), *factors(4)[2:]],
    "one matrix": factors(4)[:2],
    "three matrices": [*factors(4), *zeros(4, 3, "float32")],
}


@pytest.mark.parametrize("trouble", HOSTILE)
def test_hostile_headers_are_refused(trouble: str) -> None:
    with pytest.raises(FrameRefused):
        Factors().examine(HOSTILE[trouble], LINEAR)
    with pytest.raises(FrameRefused):
        Rows().examine(HOSTILE[trouble], TABLE)


def test_a_matrix_without_columns_has_no_rows() -> None:
    empty = Layer("fc", "factors", 3, 0, 0, None, "float32")
    Factors().examine(zeros(0, 0, "float32") + zeros(0, 3, "float32"), empty)
    with pytest.raises(FrameRefused, match="without columns"):
        Factors().examine([header(2**40, 1), *zeros(4, 3, "float32")], empty)


@pytest.mark.parametrize(
    "frames",
    [[], zeros(0, 5, "float32"), factors(2), zeros(2, 3, "float32"), zeros(2, 5, "int64")],
    ids=["nothing", "no rows", "all of it", "another width", "ids"],
)
def test_what_is_no_input_is_refused_early(frames: list[bytes]) -> None:
    with pytest.raises(FrameRefused):
        Factors().examine_early(frames, LINEAR)


def test_rows_of_a_table_do_not_leave_early() -> None:
    assert Factors.early
    assert not Rows.early
    with pytest.raises(FrameRefused, match="do not leave early"):
        Rows().examine_early(of_ids([1])[:2], TABLE)


def test_ids_have_one_dtype() -> None:
    with pytest.raises(FrameRefused, match="matrix of type float32: expected"):
        Rows().examine(zeros(2, 1, "float32") + zeros(2, 5, "float32"), TABLE)


# ---- what is made of it


class Recorder:
    """Keeps what it is asked to multiply or add."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, np.ndarray, np.ndarray, int, float]] = []

    def multiply(self, layer: Layer, dy: Values, x: Values, rows: int, share: float) -> None:
        first, second = (v.data.view(np.float32).copy() for v in (dy, x))
        self.asked.append(("multiply", first, second, rows, share))

    def add_rows(self, layer: Layer, ids: Values, values: Values, rows: int, share: float) -> None:
        first, second = ids.data.view(np.int64).copy(), values.data.view(np.float32).copy()
        self.asked.append(("add_rows", first, second, rows, share))


def framed(values: np.ndarray, dtype: str = "float32") -> list[bytes]:
    """As another precision, a value is cut: take such as have short mantissas."""
    short = values.astype(np.float32)
    raw = short.view(np.uint32) >> 16 if dtype == "bfloat16" else short
    data = raw.astype(np.uint16) if dtype == "bfloat16" else raw
    matrix = Matrix(len(values), np.ascontiguousarray(data).view(np.uint8).reshape(-1), dtype)
    return [bytes(memoryview(frame)) for frame in to_frames(matrix)]


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=4), short=st.booleans())
def test_rows_are_stacked_in_the_order_given(counts: list[int], short: bool) -> None:
    """Also of workers that sent another precision than the layer's."""
    math, scratch, dtype = Recorder(), Scratch(), "bfloat16" if short else "float32"
    xs = [np.full((n, 5), float(i + 1), np.float32) for i, n in enumerate(counts)]
    dys = [np.full((n, 3), float(-i - 1), np.float32) for i, n in enumerate(counts)]
    given_ = [framed(x, dtype) + framed(dy) for x, dy in zip(xs, dys, strict=True)]
    for _ in range(2):  # memory is reused
        Factors().combine(given_, LINEAR, math, scratch, divisor=4.0)
        (kind, dy, x, rows, share), *_ = math.asked[::-1]
        assert (kind, rows, share) == ("multiply", sum(counts), 0.25)
        np.testing.assert_array_equal(x.reshape(-1, 5), np.concatenate(xs))
        np.testing.assert_array_equal(dy.reshape(-1, 3), np.concatenate(dys))


def test_ids_and_values_are_stacked_in_the_order_given() -> None:
    math = Recorder()
    values = [np.full((2, 5), 1.5, np.float32), np.full((1, 5), -2.0, np.float32)]
    given_ = [
        of_ids(ids)[:2] + framed(v, "bfloat16")
        for ids, v in zip([[6, 0], [6]], values, strict=True)
    ]
    Rows().combine(given_, TABLE, math, Scratch(), divisor=2)
    ((kind, ids, stacked, rows, share),) = math.asked
    assert (kind, ids.tolist(), rows, share) == ("add_rows", [6, 0, 6], 3, 0.5)
    np.testing.assert_array_equal(stacked.reshape(-1, 5), np.concatenate(values))


# ---- few bits


def quantized(values: np.ndarray, wire: str, seed: int) -> list[bytes]:
    data = np.empty(matrix_nbytes(values.size, wire), np.uint8)
    quantize(data, np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8), wire, seed)
    return [bytes(memoryview(f)) for f in to_frames(Matrix(len(values), data, wire))]


@given(numel=st.integers(0, 5000), wire=st.sampled_from(FEW))
def test_sizes_are_those_of_the_kernels(numel: int, wire: str) -> None:
    assert matrix_nbytes(numel, wire) == FEW_BITS[wire].nbytes(numel)


@pytest.mark.parametrize(("wire", "step"), [("int8", 1 / 127), ("int4", 1 / 7)])
def test_values_of_few_bits_arrive_within_a_step(wire: Any, step: float) -> None:
    numbers, math = np.random.default_rng(1), Recorder()
    xs = [numbers.normal(size=(n, 5)) for n in (3, 0, 90)]
    dys = [numbers.normal(size=(n, 3)) for n in (3, 0, 90)]
    codec, pairs = Factors(wire), list(zip(xs, dys, strict=True))
    given_ = [quantized(x, wire, 1) + quantized(dy, wire, 2) for x, dy in pairs]
    for frames in given_:
        codec.examine(frames, LINEAR)
    codec.combine(given_, LINEAR, math, Scratch(), divisor=2)
    ((_, dy, x, rows, _),) = math.asked
    assert rows == 93
    for got, sent in ((x, xs), (dy, dys)):
        wanted = np.concatenate(sent).reshape(-1)
        assert 0 < np.abs(got - wanted).max() <= step * np.abs(wanted).max()


@pytest.mark.parametrize("wire", FEW)
def test_the_expected_product_is_the_exact_one(wire: Any) -> None:
    """The mean over many draws comes as near as independent draws do, and no two are equal."""
    numbers, codec, layer, draws = np.random.default_rng(2), Factors(wire), LINEAR, 4000
    x, dy = numbers.normal(size=(4, 5)), numbers.normal(size=(4, 3))
    total, squares, seen = np.zeros((3, 5)), np.zeros((3, 5)), set()
    for draw in range(draws):
        math = Recorder()
        seeds = [codec.chance(draw % 4, draw // 4, 7, place) for place in (0, 1)]
        seen.update(seeds)
        frames = quantized(x, wire, seeds[0]) + quantized(dy, wire, seeds[1])
        codec.combine([frames], layer, math, Scratch(), divisor=1)
        ((_, second, first, _, _),) = math.asked
        product = second.reshape(4, 3).T.astype(np.float64) @ first.reshape(4, 5) - dy.T @ x
        total, squares = total + product, squares + product**2
    assert len(seen) == 2 * draws
    mean, deviation = total / draws, np.sqrt(squares / draws)
    assert deviation.max() > 0
    assert (np.abs(mean) <= 5 * deviation / np.sqrt(draws) + 1e-4).all()


def test_chance_differs_by_worker_step_layer_and_matrix_and_can_be_repeated() -> None:
    places = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    drawn = [Factors("int8").chance(*place) for place in places]
    assert len(set(drawn)) == len(places)
    assert drawn == [Factors("int8").chance(*place) for place in places]
    assert drawn[0] != Factors("int8", seed=1).chance(*places[0])


@pytest.mark.parametrize("wire", FEW)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_visible(wire: Any, odd: float) -> None:
    math, values = Recorder(), np.ones((2, 5), np.float32)
    values[1, 2] = odd
    frames = quantized(values, wire, 0) + quantized(np.ones((2, 3)), wire, 1)
    Factors(wire).combine([frames], LINEAR, math, Scratch(), divisor=1)
    ((_, _, x, _, _),) = math.asked
    np.testing.assert_array_equal(x.reshape(2, 5)[1, 2], odd)
    assert np.isfinite(np.delete(x, 7)).all()


@pytest.mark.parametrize("wire", FEW)
def test_few_bits_that_are_cut_are_refused(wire: Any) -> None:
    frames = quantized(np.ones((2, 5)), wire, 0) + quantized(np.ones((2, 3)), wire, 1)
    Factors(wire).examine(frames, LINEAR)
    for broken in (
        [frames[0], frames[1][:-1], *frames[2:]],
        [HEADER.pack(2**63, DTYPES.index(wire)), *frames[1:]],
        frames[:-1],
    ):
        with pytest.raises(FrameRefused):
            Factors(wire).examine(broken, LINEAR)


def test_few_bits_are_of_short_floats_too_but_not_of_ids_or_float64() -> None:
    assert Factors("int8").wire_dtype("bfloat16", 0) == "int8"
    assert Factors("int8").wire_dtype("float64", 1) == "float64"
    assert Rows("int4").wire_dtype("int64", 0) == "int64"
    assert Rows("int4").wire_dtype("float32", 1) == "int4"
    assert [Factors(wire).name for wire in FEW] == ["factors-int8", "factors-int4"]
    assert all(Rows(wire).lossy for wire in FEW)


# ---- recipes


def test_what_matrices_travel_as() -> None:
    for codec in (Factors, Rows):
        assert codec().wire_dtype("float32", 1) == "float32"
        assert codec("bfloat16").wire_dtype("float32", 1) == "bfloat16"
        assert codec("bfloat16").wire_dtype("float64", 1) == "float64"
        assert codec("float32").wire_dtype("bfloat16", 1) == "float32"
        assert [codec(wire).lossy for wire in WIRES] == [False, True, False]
    assert Rows("bfloat16").wire_dtype("int64", 0) == "int64"


def test_names_and_facts() -> None:
    assert [Factors(wire).name for wire in WIRES] == ["factors", "factors-bfloat16", "factors"]
    assert [Rows(wire).name for wire in WIRES] == ["rows", "rows-bfloat16", "rows"]
    assert (Factors.form, Rows.form) == ("factors", "rows")
    assert Factors().facts() == Rows().facts() == {"up: compact form"}


@pytest.mark.parametrize("codec", [Factors, Rows])
@pytest.mark.parametrize("wire", ["float16", "int3", "", None])
def test_other_wires_are_refused(codec: Any, wire: Any) -> None:
    with pytest.raises(ConfigError, match=r"wire=.* choose one of same, .*, int8, int4"):
        codec(wire)


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5, True])
def test_other_seeds_are_refused(seed: Any) -> None:
    with pytest.raises(ConfigError, match=r"seed=.* from 0 to 2\*\*32 - 1"):
        Factors("int8", seed)


def test_what_has_no_compact_form_is_refused_with_the_way_out() -> None:
    plain = Spec("conv.weight", (3, 3), "float32", 0)
    linear = Spec("fc.weight", (3, 5), "float32", 0, layer="fc", form="factors")
    table = Spec("words.weight", (7, 5), "float32", 0, layer="words", form="rows")
    hooked = Spec("fc.weight", (3, 5), "float32", 0, obstacle="a hook wants to see it")
    assert Factors().obstacle(linear) == Rows().obstacle(table) == ""
    for codec in (Factors(), Rows()):
        assert codec.obstacle(plain).endswith("route it to Dense()")
        assert codec.obstacle(hooked) == "a hook wants to see it"
    assert Factors().obstacle(table)
    assert Rows().obstacle(linear)
