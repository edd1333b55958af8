"""The filter's values in few bits: both kernels against frames made by hand, and ties."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
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
    quantize_pack,
    quantized_nbytes,
)

Array = np.ndarray[Any, Any]
PACKS: list[Callable[..., int]] = [bounded_pack, bounded_pack_portable]
WRITES: list[Callable[..., None]] = [bounded_write, bounded_write_portable]
packs = pytest.mark.parametrize("pack", PACKS)
wires = pytest.mark.parametrize("wire", ["int8", "int4"])
DENSE, BITMAP, INDEXES, BLOCK = 1, 2, 3, 64
CODES, BITS = {"int8": 3, "int4": 4}, {"int8": 8, "int4": 4}
HEADER = struct.Struct("<BBBBII")
COUNTS = [0, 1, 2, 7, 8, 9, 17, 63, 64, 65, 129, 200, 2049, 5000]
DENSITIES = [0.0, 0.005, 0.05, 0.3, 1.0]


def drawn(count: int, density: float, seed: int) -> Array:
    """About ``density`` of them are beyond 1, the others within."""
    numbers = np.random.default_rng(seed)
    large = numbers.random(count) < density
    sizes = np.where(large, numbers.uniform(1.01, 9, count), numbers.uniform(0, 0.99, count))
    return (sizes * numbers.choice([-1, 1], count)).astype(np.float32)


def packed(
    pack: Callable[..., int], gradient: Array, residual: Array, wire: str, **how: Any
) -> tuple[bytes, Array]:
    """The frame, and the residual afterwards; memory behind the room is not touched."""
    kept, room = residual.copy(), bounded_nbytes(gradient.size, wire)
    out = np.full(room + 16, 0x5A, np.uint8)
    nbytes = pack(out[:room], gradient, kept, how.get("delta", 1.0), wire, how.get("ties", 0))
    assert (out[room:] == 0x5A).all()
    return out[:nbytes].tobytes(), kept


def expected(gradient: Array, residual: Array, wire: str) -> tuple[bytes, Array]:
    """What a frame of entries beyond 1 holds, made run by run with the kernel of ``Quantized``."""
    acc = gradient + residual
    travels = ~(np.abs(acc) <= 1)
    values, left = acc[travels], acc.copy()
    runs, rests = b"", [np.empty(0, np.float32)]
    for start in range(0, values.size, BLOCK):
        run, rest = values[start : start + BLOCK], np.zeros_like(values[start : start + BLOCK])
        out = np.empty(quantized_nbytes(run.size, BITS[wire], BLOCK), np.uint8)
        quantize_pack(out, run, rest, BITS[wire], BLOCK)
        runs += out.tobytes()
        rests.append(rest)
    left[travels] = np.concatenate(rests)
    bitmap = np.packbits(travels, bitorder="little").tobytes()
    places = np.flatnonzero(travels)
    gaps = b"".join(leb128(int(gap)) for gap in np.diff(places, prepend=-1) - 1)
    form, behind = (INDEXES, gaps) if len(gaps) < len(bitmap) else (BITMAP, bitmap)
    head = HEADER.pack(form, CODES[wire], 0, 0, values.size, len(runs) + len(behind))
    return head + runs + behind, left


def leb128(number: int) -> bytes:
    if number < 0x80:
        return bytes([number])
    return bytes([number & 0x7F | 0x80]) + leb128(number >> 7)


@packs
@wires
@pytest.mark.parametrize("count", COUNTS)
def test_a_frame_is_as_made_by_hand(pack: Callable[..., int], wire: str, count: int) -> None:
    for seed, density in enumerate(DENSITIES):
        gradient, residual = drawn(count, density, seed), drawn(count, 0.0, seed + 100) / 2
        frame, kept = packed(pack, gradient, residual, wire)
        wanted, left = expected(gradient, residual, wire)
        assert frame == wanted
        np.testing.assert_array_equal(kept, left)
        bounded_check(frame, count)


@wires
@given(seed=st.integers(0, 2**32), count=st.integers(1, 300), density=st.floats(0, 1))
def test_sent_and_kept_are_exactly_what_was_given_and_kept(
    wire: str, seed: int, count: int, density: float
) -> None:
    gradient, residual = drawn(count, density, seed), drawn(count, 0.1, seed + 1)
    acc = gradient + residual
    frame, kept = packed(bounded_pack, gradient, residual, wire)
    for write in WRITES:
        sent = np.full(count, 7.0, np.float32)
        write(sent, frame)
        np.testing.assert_array_equal(sent.astype(np.float64) + kept, acc.astype(np.float64))
    for add in (bounded_add, bounded_add_portable):
        total = np.ones(count, np.float32)
        add(total, frame)
        np.testing.assert_array_equal(total, np.float32(1) + sent)


@packs
@wires
def test_what_is_not_finite_travels_and_does_not_stay(pack: Callable[..., int], wire: str) -> None:
    gradient = drawn(200, 0.4, 3)
    gradient[[5, 50, 150]] = np.nan, np.inf, -np.inf
    frame, kept = packed(pack, gradient, np.zeros_like(gradient), wire)
    sent = np.empty_like(gradient)
    bounded_write(sent, frame)
    np.testing.assert_array_equal(sent[[5, 50, 150]], gradient[[5, 50, 150]])
    assert not kept[[5, 50, 150]].any()
    others = np.isfinite(gradient)
    assert np.isfinite(sent[others]).all()
    np.testing.assert_array_equal((sent + kept)[others], gradient[others])


@packs
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8", "int4"])
@given(sizes=st.lists(st.sampled_from([0.5, 1.0, -1.0, 2.0]), max_size=70), ties=st.integers(0, 9))
def test_of_equal_entries_the_first_travel(
    pack: Callable[..., int], wire: str, sizes: list[float], ties: int
) -> None:
    values = np.array(sizes, np.float32)
    frame, _ = packed(pack, values, np.zeros_like(values), wire, ties=ties)
    sent = np.empty_like(values)
    bounded_write(sent, frame)
    equal = np.flatnonzero(np.abs(values) == 1)
    wanted = np.abs(values) > 1
    wanted[equal[:ties]] = True
    np.testing.assert_array_equal(sent != 0, wanted)


@wires
def test_frames_that_were_cut_or_are_dense_are_refused(wire: str) -> None:
    gradient = drawn(300, 0.05, 1)
    frame, _ = packed(bounded_pack, gradient, np.zeros_like(gradient), wire)
    for stop in range(len(frame)):
        with pytest.raises(ValueError, match="frame of"):
            bounded_check(frame[:stop], 300)
    body = bytes(300 * BITS[wire] // 8 + 5 * 4)
    dense = HEADER.pack(DENSE, CODES[wire], 0, 0, 300, len(body)) + body
    with pytest.raises(ValueError, match="few bits are not sent as"):
        bounded_check(dense, 300)
    unknown = HEADER.pack(frame[0], 5, 0, 0, *HEADER.unpack_from(frame)[4:]) + frame[12:]
    with pytest.raises(ValueError, match="type of its values is unknown"):
        bounded_check(unknown, 300)


def test_a_name_that_is_no_format_is_refused() -> None:
    with pytest.raises(ValueError, match="float32, bfloat16, int8 or int4, not 'int3'"):
        bounded_nbytes(4, "int3")
