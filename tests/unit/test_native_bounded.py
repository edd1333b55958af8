"""The value-bounded filter: both kernels against a frame made by hand, and frames made badly."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream._native import (
    bounded_add,
    bounded_add_portable,
    bounded_check,
    bounded_nbytes,
    bounded_pack,
    bounded_pack_portable,
    bounded_write,
    bounded_write_portable,
    mean_into,
)

Array = np.ndarray[Any, Any]
PACKS: list[Callable[..., int]] = [bounded_pack, bounded_pack_portable]
ADDS: list[Callable[..., None]] = [bounded_add, bounded_add_portable]
WRITES: list[Callable[..., None]] = [bounded_write, bounded_write_portable]
packs = pytest.mark.parametrize("pack", PACKS)
unpacks = pytest.mark.parametrize("unpack", ADDS + WRITES)
wires = pytest.mark.parametrize("wire", ["float32", "bfloat16"])
DENSE, BITMAP, INDEXES = 1, 2, 3
CODES = {"float32": 1, "bfloat16": 2}
STORED = {"float32": "<u4", "bfloat16": "<u2"}
HEADER = struct.Struct("<BBBBII")
LARGEST_BFLOAT16 = np.uint32(0x7F7F0000).view(np.float32)
# Around the bytes of bits, the words in which gaps are looked for, and the block of 2048 values.
COUNTS = [0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 200, 2047, 2048, 2049, 5000]
DENSITIES = [0.0, 0.001, 0.05, 0.2, 0.6, 0.96, 0.98, 1.0]
ODD = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, -3.4028235e38, 1e-39],
    np.float32,
)


def sparse(count: int, density: float, *, seed: int) -> Array:
    """About ``density`` of them are beyond 1, the others within."""
    random = np.random.default_rng(seed)
    large = random.random(count) < density
    sizes = np.where(large, random.uniform(1.01, 9, count), random.uniform(0, 0.99, count))
    return (sizes * random.choice([-1, 1], count)).astype(np.float32)


def with_odd_ones(values: Array, *, seed: int) -> Array:
    random = np.random.default_rng(seed)
    return np.where(random.random(values.size) < 0.3, random.choice(ODD, values.size), values)


def any_patterns(count: int, *, seed: int) -> Array:
    """Every bit pattern is as likely: subnormals, infinities and NaN included."""
    return np.frombuffer(np.random.default_rng(seed).bytes(4 * count), np.float32).copy()


def packed(
    pack: Callable[..., int],
    gradient: Array,
    residual: Array | None = None,
    *,
    delta: float = 1.0,
    wire: str = "float32",
) -> tuple[bytes, Array]:
    """The frame, and the residual afterwards."""
    kept = np.zeros_like(gradient) if residual is None else residual.copy()
    out = np.full(bounded_nbytes(gradient.size, wire), 0x5A, np.uint8)
    nbytes = pack(out, gradient, kept, delta, wire)
    return out[:nbytes].tobytes(), kept


# ---- by hand


def summed(gradient: Array, residual: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        acc = gradient + residual
    return np.where(np.isnan(acc), np.float32(np.nan), acc)


def rounded(acc: Array, wire: str) -> Array:
    """As it travels, but still as float32."""
    if wire == "float32":
        return acc
    halves = np.empty(acc.size, np.uint16)
    mean_into(halves, [acc], "float32", 1.0, out_dtype="bfloat16")
    sent = (halves.astype(np.uint32) << 16).view(np.float32)
    return np.where(np.isinf(sent) & np.isfinite(acc), np.copysign(LARGEST_BFLOAT16, acc), sent)


def stored(sent: Array, wire: str) -> bytes:
    bits = np.ascontiguousarray(sent, np.float32).view(np.uint32)
    return (bits if wire == "float32" else bits >> 16).astype(STORED[wire]).tobytes()


def leb128(number: int) -> bytes:
    if number < 0x80:
        return bytes([number])
    return bytes([number & 0x7F | 0x80]) + leb128(number >> 7)


def gaps(places: Array) -> bytes:
    before = np.concatenate([[-1], places[:-1]])
    return b"".join(leb128(int(gap)) for gap in places - before - 1)


def made(form: int, sent: Array, travels: Array, wire: str) -> bytes:
    """A frame in the form asked for."""
    values = stored(np.where(travels, sent, 0) if form == DENSE else sent[travels], wire)
    behind = {
        DENSE: b"",
        BITMAP: np.packbits(travels, bitorder="little").tobytes(),
        INDEXES: gaps(np.flatnonzero(travels)),
    }[form]
    kept = travels.size if form == DENSE else int(travels.sum())
    return HEADER.pack(form, CODES[wire], 0, 0, kept, len(values + behind)) + values + behind


def expected(gradient: Array, residual: Array, delta: float, wire: str) -> tuple[bytes, Array]:
    acc = summed(gradient, residual)
    travels = ~(np.abs(acc).astype(np.float64) <= delta)
    sent = rounded(acc, wire)
    with np.errstate(invalid="ignore"):
        left = np.where(np.isfinite(acc), acc - sent, np.float32(0))
    frames = [made(form, sent, travels, wire) for form in (BITMAP, DENSE, INDEXES)]
    return min(frames, key=len), np.where(travels, left, acc)


def decoded(sent: Array, travels: Array) -> Array:
    """What arrives: zeros are positive."""
    return np.where(travels, sent, np.float32(0)) + np.float32(0)


# ---- packing


@packs
@wires
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("count", COUNTS)
def test_packing_is_what_the_header_says(
    pack: Callable[..., int], wire: str, density: float, count: int
) -> None:
    gradient, residual = sparse(count, density, seed=1), sparse(count, density / 2, seed=2)
    frame, kept = packed(pack, gradient, residual, wire=wire)
    by_hand, kept_by_hand = expected(gradient, residual, 1.0, wire)
    assert frame == by_hand
    assert kept.tobytes() == kept_by_hand.tobytes()


@wires
@pytest.mark.parametrize("count", range(201))
def test_packing_is_the_same_with_and_without_avx2(wire: str, count: int) -> None:
    for seed, density in enumerate(np.random.default_rng(count).random(8)):
        gradient = with_odd_ones(sparse(count, density, seed=seed), seed=seed + 50)
        residual = with_odd_ones(sparse(count, density, seed=seed + 100), seed=seed + 150)
        one, kept = packed(bounded_pack, gradient, residual, wire=wire)
        other, kept_too = packed(bounded_pack_portable, gradient, residual, wire=wire)
        by_hand, kept_by_hand = expected(gradient, residual, 1.0, wire)
        assert one == other == by_hand
        assert kept.tobytes() == kept_too.tobytes() == kept_by_hand.tobytes()


@given(
    count=st.integers(0, 3000),
    seed=st.integers(0, 2**32 - 1),
    wire=st.sampled_from(["float32", "bfloat16"]),
    delta=st.sampled_from([0.0, 1e-40, 1e-20, 1.0, 1e20, 3.4e38, 1e300]),
)
def test_whatever_the_bits_all_that_is_not_finite_travels(
    count: int, seed: int, wire: str, delta: float
) -> None:
    gradient, residual = any_patterns(count, seed=seed), any_patterns(count, seed=seed + 1)
    by_hand, kept_by_hand = expected(gradient, residual, delta, wire)
    for pack in PACKS:
        frame, kept = packed(pack, gradient, residual, delta=delta, wire=wire)
        assert frame == by_hand
        assert kept.tobytes() == kept_by_hand.tobytes()
        assert np.isfinite(kept).all()


@packs
@wires
@pytest.mark.parametrize(
    ("density", "form"),
    [(0.001, INDEXES), (0.05, INDEXES), (0.2, BITMAP), (0.6, BITMAP), (1.0, DENSE)],
)
def test_the_smallest_form_is_taken(
    pack: Callable[..., int], wire: str, density: float, form: int
) -> None:
    gradient = sparse(20_000, density, seed=3)
    frame, _ = packed(pack, gradient, wire=wire)
    assert frame[0] == form
    travels = np.abs(gradient) > 1
    sizes = [len(made(each, gradient, travels, wire)) for each in (DENSE, BITMAP, INDEXES)]
    assert len(frame) == min(sizes)


@packs
@pytest.mark.parametrize("missing", range(12))
def test_dense_is_taken_exactly_where_the_bits_cost_more(
    pack: Callable[..., int], missing: int
) -> None:
    """320 values have 40 bytes of bits: as much as ten values that stay."""
    gradient = np.full(320, 2, np.float32)
    gradient[:: 320 // 12][:missing] = 0.5
    frame, kept = packed(pack, gradient)
    assert frame[0] == (DENSE if missing < 10 else BITMAP)
    np.testing.assert_array_equal(kept, np.where(gradient < 1, gradient, 0))
    out = np.empty(320, np.float32)
    bounded_write(out, frame)
    np.testing.assert_array_equal(out, np.where(gradient < 1, 0, gradient))


@packs
@pytest.mark.parametrize(("kept", "form"), [(126, INDEXES), (127, BITMAP)])
def test_indexes_are_taken_exactly_where_they_cost_less_than_bits(
    pack: Callable[..., int], kept: int, form: int
) -> None:
    """1024 values have 128 bytes of bits; each index takes one but the first, which takes two."""
    gradient = np.zeros(1024, np.float32)
    gradient[200 : 200 + kept] = 2
    frame, _ = packed(pack, gradient)
    assert frame[0] == form
    assert len(frame) == HEADER.size + 4 * kept + (kept + 1)


@packs
@pytest.mark.parametrize("gap", [0, 1, 126, 127, 128, 129, 16383, 16384, 16385, 2**21, 2**21 + 1])
def test_gaps_of_every_length(pack: Callable[..., int], gap: int) -> None:
    gradient = np.zeros(gap + 2**15, np.float32)
    gradient[[gap, gap + 1, gap + 20_000]] = [2, 3, 4]
    frame, _ = packed(pack, gradient)
    assert frame[HEADER.size + 12 :] == leb128(gap) + b"\0" + leb128(19_998)
    out = np.empty_like(gradient)
    for write in WRITES:
        write(out, frame)
        np.testing.assert_array_equal(out, gradient)


@packs
@wires
@pytest.mark.parametrize("count", [1, 8, 21, 64, 300])
def test_nothing_beyond_the_bound_is_a_header_alone(
    pack: Callable[..., int], wire: str, count: int
) -> None:
    gradient = np.full(count, -1.0, np.float32)
    frame, kept = packed(pack, gradient, wire=wire)
    assert frame == HEADER.pack(INDEXES, CODES[wire], 0, 0, 0, 0)
    np.testing.assert_array_equal(kept, gradient)


@packs
def test_the_bound_is_compared_as_it_was_given(pack: Callable[..., int]) -> None:
    """0.1 is less than the float32 nearest to it, so that one travels."""
    tenth = np.float32(0.1)
    assert float(tenth) > 0.1
    below = np.nextafter(tenth, np.float32(0))
    frame, kept = packed(pack, np.array([tenth, below] * 9), delta=0.1)
    assert frame[4] == 9
    assert kept.tolist() == [0, below] * 9


@packs
@wires
def test_what_is_not_finite_travels_and_leaves_no_trace(
    pack: Callable[..., int], wire: str
) -> None:
    gradient = np.tile(np.array([np.nan, np.inf, -np.inf, 0.5], np.float32), 5)
    frame, kept = packed(pack, gradient, delta=1e300, wire=wire)
    assert kept.tolist() == [0, 0, 0, 0.5] * 5
    out = np.empty(20, np.float32)
    bounded_write(out, frame)
    np.testing.assert_array_equal(out, np.where(gradient == 0.5, 0, gradient))


@packs
def test_a_finite_value_never_becomes_infinite(pack: Callable[..., int]) -> None:
    largest = np.finfo(np.float32).max
    gradient = np.array([largest, -largest] * 10, np.float32)
    frame, kept = packed(pack, gradient, wire="bfloat16")
    out = np.empty(20, np.float32)
    bounded_write(out, frame)
    assert out.tolist() == [LARGEST_BFLOAT16, -LARGEST_BFLOAT16] * 10
    np.testing.assert_array_equal(out + kept, gradient)


# ---- unpacking


@wires
@pytest.mark.parametrize("form", [DENSE, BITMAP, INDEXES])
@given(
    count=st.integers(0, 3000), density=st.floats(0, 1), seed=st.integers(0, 999), odd=st.booleans()
)
def test_every_form_decodes_to_the_same(
    wire: str, form: int, count: int, density: float, seed: int, odd: bool
) -> None:
    values = sparse(count, density, seed=seed)
    sent = rounded(summed(with_odd_ones(values, seed=seed), np.float32(0)) if odd else values, wire)
    travels = ~(np.abs(sent) <= 1)
    frame = made(form, sent, travels, wire)
    bounded_check(frame, count)
    arrived = decoded(sent, travels)
    before = any_patterns(count, seed=seed)
    total = np.where(arrived == 0, before, summed(before, arrived))
    for write, add in zip(WRITES, ADDS, strict=True):
        out = np.full(count, 7, np.float32)
        write(out, frame)
        assert out.tobytes() == arrived.tobytes()
        out = before.copy()
        add(out, frame)
        assert out.tobytes() == total.tobytes()


@packs
@wires
def test_unaligned_buffers(pack: Callable[..., int], wire: str) -> None:
    count = 2501
    for density in (0.01, 0.5, 1.0):
        gradient = sparse(count, density, seed=1)
        frame, kept = packed(pack, gradient, wire=wire)
        sizes = bounded_nbytes(count, wire), 4 * count, 4 * count
        rooms = [bytearray(b"\xee" * (nbytes + 10)) for nbytes in sizes]
        rooms[1][3:-7] = gradient.tobytes()
        rooms[2][1:-9] = bytes(4 * count)
        out, source, residual = (
            memoryview(room)[shift : shift - 10]
            for room, shift in zip(rooms, (5, 3, 1), strict=True)
        )
        assert pack(out, source, residual, 1.0, wire) == len(frame)
        assert bytes(out[: len(frame)]) == frame
        assert bytes(residual) == kept.tobytes()
        for write, add in zip(WRITES, ADDS, strict=True):
            write(source, out[: len(frame)])
            add(source, out[: len(frame)])
            arrived = np.empty(count, np.float32)
            bounded_write(arrived, frame)
            assert bytes(source) == (2 * arrived).tobytes()
        for room, shift in zip(rooms, (5, 3, 1), strict=True):
            assert room[:shift] == b"\xee" * shift
            assert room[shift - 10 :] == b"\xee" * (10 - shift)


# ---- frames made badly

GUARD = 64


def refused(frame: bytes, count: int, reason: str = ".") -> None:
    """By the check and by everything that decodes, which changes nothing anywhere."""
    with pytest.raises(ValueError, match=reason):
        bounded_check(frame, count)
    for unpack in ADDS + WRITES:
        room = bytearray(b"\xee" * (4 * count + 2 * GUARD))
        with pytest.raises(ValueError, match=reason):
            unpack(memoryview(room)[GUARD : GUARD + 4 * count], frame)
        assert room == b"\xee" * len(room)


def frame_of(form: int, kept: int, values: bytes, behind: bytes, **changes: int) -> bytes:
    fields = {"form": form, "type": 1, "squeeze": 0, "zero": 0, "kept": kept}
    fields |= {"body": len(values + behind)} | changes
    return HEADER.pack(*fields.values()) + values + behind


TWO = np.array([2, 3], "<f4").tobytes()


def test_the_frames_that_the_bad_ones_are_made_of_are_good() -> None:
    for frame in (
        frame_of(DENSE, 2, TWO, b""),
        frame_of(BITMAP, 2, TWO, b"\x03"),
        frame_of(INDEXES, 2, TWO, b"\0\0"),
    ):
        out = np.empty(2, np.float32)
        bounded_write(out, frame)
        assert out.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("frame", "count", "reason"),
    [
        (b"", 0, "shorter than a header"),
        (frame_of(0, 2, TWO, b""), 2, "form is unknown"),
        (frame_of(4, 2, TWO, b""), 2, "form is unknown"),
        (frame_of(DENSE, 2, TWO, b"", type=0), 2, "type of its values is unknown"),
        (frame_of(DENSE, 2, TWO, b"", type=5), 2, "type of its values is unknown"),
        (frame_of(DENSE, 2, TWO, b"", squeeze=1), 2, "it is squeezed"),
        (frame_of(DENSE, 2, TWO, b"", zero=1), 2, "byte 3 of its header"),
        (frame_of(DENSE, 2, TWO, b"", body=9), 2, "not as long as its header says"),
        (frame_of(DENSE, 2, TWO, b""), 1, "more values than there are elements"),
        (frame_of(DENSE, 2, TWO, b""), 3, "dense, not of all values"),
        (frame_of(DENSE, 2, TWO, b"\0"), 2, "dense, not of all values"),
        (frame_of(DENSE, 1, TWO, b""), 2, "dense, not of all values"),
        (frame_of(DENSE, 2**32 - 1, TWO, b""), 2, "more values than there are elements"),
        (frame_of(DENSE, 3, TWO, b""), 3, "values are cut short"),
        (frame_of(BITMAP, 2, TWO[:7], b""), 2, "values are cut short"),
        (frame_of(BITMAP, 2, TWO, b""), 2, "bitmap has another size"),
        (frame_of(BITMAP, 2, TWO, b"\x03\0"), 8, "bitmap has another size"),
        (frame_of(BITMAP, 2, TWO, b"\x03"), 9, "bitmap has another size"),
        (frame_of(BITMAP, 2, TWO, b"\x01"), 2, "count differently"),
        (frame_of(BITMAP, 2, TWO, b"\x07"), 8, "count differently"),
        (frame_of(BITMAP, 2, TWO, b"\x05"), 2, "bits of no value"),
        (frame_of(BITMAP, 2, TWO, b"\x01\x04"), 10, "bits of no value"),
        (frame_of(INDEXES, 2, TWO, b"\0"), 2, "cut short, or longer"),
        (frame_of(INDEXES, 2, TWO, b"\0\x80"), 300, "cut short, or longer"),
        (frame_of(INDEXES, 2, TWO, b"\0\x81\0"), 300, "cut short, or longer"),
        (frame_of(INDEXES, 2, TWO, b"\0" + b"\xff" * 4 + b"\x80\x01"), 300, "cut short, or longer"),
        (frame_of(INDEXES, 2, TWO, b"\0" + b"\xff" * 4 + b"\x7f"), 300, "beyond the last value"),
        (frame_of(INDEXES, 2, TWO, b"\0\x01"), 2, "beyond the last value"),
        (frame_of(INDEXES, 2, TWO, b"\x02\0"), 2, "beyond the last value"),
        (frame_of(INDEXES, 2, TWO, b"\0\0\0"), 2, "left over"),
    ],
)
def test_a_bad_frame_is_refused_with_the_reason(frame: bytes, count: int, reason: str) -> None:
    refused(frame, count, f"frame of {len(frame)} bytes for {count} values: .*{reason}")


@wires
@pytest.mark.parametrize("form", [DENSE, BITMAP, INDEXES])
@pytest.mark.parametrize("count", [40, 77])
def test_a_frame_cut_anywhere_or_with_more_behind_is_refused(
    wire: str, form: int, count: int
) -> None:
    values = sparse(count, 0.3, seed=1)
    frame = made(form, values, np.abs(values) > 1, wire)
    bounded_check(frame, count)
    for length in range(len(frame)):
        refused(frame[:length], count)
        # With a header that agrees about the length.
        if length >= HEADER.size:
            body = struct.pack("<I", length - HEADER.size)
            refused(frame[:8] + body + frame[12:length], count)
    refused(frame + b"\0", count)
    refused(frame[:8] + struct.pack("<I", len(frame) + 1 - HEADER.size) + frame[12:] + b"\0", count)


@settings(max_examples=1000)
@given(
    count=st.integers(0, 200),
    density=st.sampled_from([0.02, 0.3, 1.0]),
    wire=st.sampled_from(["float32", "bfloat16"]),
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 20),
    agrees=st.booleans(),
)
def test_changed_frames_stay_within_their_destination(
    count: int,
    density: float,
    wire: str,
    changes: list[tuple[int, int]],
    cut: int,
    agrees: bool,
) -> None:
    """Refused by all or decoded by all, to the same; never beyond ``out``."""
    frame = bytearray(packed(bounded_pack, sparse(count, density, seed=count), wire=wire)[0])
    for place, byte in changes:
        # Half of them in the header and behind the values, where the structure is.
        frame[place % len(frame) if place % 2 else -(place % 16) % len(frame)] = byte
    frame = frame[: max(0, len(frame) - cut)]
    if agrees and len(frame) >= HEADER.size:
        frame[8:12] = struct.pack("<I", len(frame) - HEADER.size)
    try:
        bounded_check(frame, count)
    except ValueError:
        refused(bytes(frame), count)
        return
    rooms = [bytearray(b"\xee" * (4 * count + 2 * GUARD)) for _ in WRITES]
    for write, room in zip(WRITES, rooms, strict=True):
        write(memoryview(room)[GUARD : GUARD + 4 * count], frame)
        assert room[:GUARD] == room[GUARD + 4 * count :] == b"\xee" * GUARD
    assert rooms[0] == rooms[1]


# ---- arguments

ROOM = memoryview(bytearray(128))


@packs
@pytest.mark.parametrize(
    ("out", "gradient", "residual", "delta", "wire", "message"),
    [
        (bytearray(40), bytes(6), bytearray(6), 1, "float32", r"gradient has 6 bytes, not a mul"),
        (bytearray(40), bytes(8), bytearray(4), 1, "float32", r"residual has 4 bytes, gradient"),
        (bytearray(20), bytes(8), bytearray(8), 1, "float32", r"out has 20 bytes where 2 val.* 21"),
        (bytearray(16), bytes(8), bytearray(8), 1, "bfloat16", r"out has 16 bytes where .* 17"),
        (bytes(40), bytes(8), bytearray(8), 1, "float32", r"out must be writable"),
        (bytearray(40), bytes(8), bytes(8), 1, "float32", r"residual must be writable"),
        (bytearray(40), bytes(8), bytearray(8), -1, "float32", r"delta must be finite and not neg"),
        (bytearray(40), bytes(8), bytearray(8), np.nan, "float32", r"delta must be finite"),
        (bytearray(40), bytes(8), bytearray(8), np.inf, "float32", r"delta must be finite"),
        (bytearray(40), bytes(8), bytearray(8), 1, "float16", r"values must be float32, bfloat"),
        (ROOM[:40], ROOM[32:40], bytearray(8), 1, "float32", r"must not overlap"),
        (ROOM[:40], bytes(8), ROOM[32:40], 1, "float32", r"must not overlap"),
        (bytearray(40), ROOM[:8], ROOM[:8], 1, "float32", r"must not overlap"),
    ],
)
def test_packing_refuses(
    pack: Callable[..., int],
    out: Any,
    gradient: Any,
    residual: Any,
    delta: float,
    wire: str,
    message: str,
) -> None:
    before = bytes(out), bytes(residual)
    with pytest.raises(ValueError, match=message):
        pack(out, gradient, residual, delta, wire)
    assert (bytes(out), bytes(residual)) == before


@unpacks
@pytest.mark.parametrize(
    ("out", "frame", "message"),
    [
        (bytearray(7), frame_of(DENSE, 2, TWO, b""), r"out has 7 bytes, not a multiple of the 4"),
        (bytes(8), frame_of(DENSE, 2, TWO, b""), r"out must be writable"),
        (ROOM[:8], ROOM[4:24], r"frame overlaps out"),
    ],
)
def test_unpacking_refuses(unpack: Callable[..., None], out: Any, frame: Any, message: str) -> None:
    before = bytes(out)
    with pytest.raises(ValueError, match=message):
        unpack(out, frame)
    assert bytes(out) == before


def test_more_values_than_the_header_can_count_are_refused() -> None:
    assert bounded_nbytes(2**29, "float32") == 12 + 2**31 + 2**26
    with pytest.raises(ValueError, match=r"536870913 values are more than the 536870912"):
        bounded_nbytes(2**29 + 1, "float32")
    with pytest.raises(ValueError, match=r"more than"):
        bounded_check(bytes(12), 2**29 + 1)
