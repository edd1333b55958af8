"""One bit a value: both kernels against numpy, bit for bit, and what is lost against fractions."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream._native import (
    mean_into,
    one_bit_pack,
    one_bit_pack_portable,
    one_bit_unpack,
    one_bit_unpack_portable,
)

Array = np.ndarray[Any, Any]
PACKS: list[Callable[..., None]] = [one_bit_pack, one_bit_pack_portable]
UNPACKS: list[Callable[..., None]] = [one_bit_unpack, one_bit_unpack_portable]
packs = pytest.mark.parametrize("pack", PACKS)
unpacks = pytest.mark.parametrize("unpack", UNPACKS)
# Around the bytes of bits, and the unpacking kernel's block of 2048 values.
COUNTS = [0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 2047, 2048, 2049, 5000]
LANES = 8
FLOATS = st.floats(width=32)
FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


def normal(count: int, *, seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)


def any_patterns(count: int, *, seed: int) -> Array:
    """Every bit pattern is as likely: subnormals, infinities and NaN included."""
    return np.frombuffer(np.random.default_rng(seed).bytes(4 * count), np.float32).copy()


def packed(
    pack: Callable[..., None], gradient: Array, residual: Array | None = None
) -> tuple[bytes, Array]:
    """The bytes, and the residual afterwards."""
    kept = np.zeros_like(gradient) if residual is None else residual.copy()
    out = np.full(8 + -(-gradient.size // 8), 0x5A, np.uint8)
    pack(out, gradient, kept)
    return out.tobytes(), kept


def scales(frame: bytes) -> Array:
    """Of clear and of set bits."""
    return np.frombuffer(frame[:8], "<f4")


def bits(frame: bytes, count: int) -> Array:
    raw = np.frombuffer(frame[8:], np.uint8)
    return np.unpackbits(raw, count=count, bitorder="little").astype(bool)


def decoded(frame: bytes, count: int) -> Array:
    clear, set_ = scales(frame)
    return np.where(bits(frame, count), set_, clear)


def lane_mean(acc: Array, chosen: Array) -> np.float32:
    """As the header words it: sums in double by lane, the lanes added in order."""
    if not chosen.any():
        return np.float32(0)
    terms = np.zeros(-(-acc.size // LANES) * LANES)
    terms[: acc.size] = np.where(chosen, acc, 0)
    total = 0.0
    for lane in range(LANES):
        total += float(np.cumsum(terms[lane::LANES])[-1])  # cumsum adds one after the other
    return np.float32(total / chosen.sum())


@packs
@pytest.mark.parametrize("count", COUNTS)
def test_packing_is_what_the_header_says(pack: Callable[..., None], count: int) -> None:
    gradient, residual = normal(count, seed=1), normal(count, seed=2)
    frame, kept = packed(pack, gradient, residual)
    acc = gradient + residual
    expected = np.array([lane_mean(acc, acc < 0), lane_mean(acc, acc >= 0)], "<f4")
    assert frame[:8] == expected.tobytes()
    assert frame[8:] == np.packbits(acc >= 0, bitorder="little").tobytes()
    np.testing.assert_array_equal(kept, acc - np.where(acc >= 0, expected[1], expected[0]))


@given(count=st.integers(0, 3000), seed=st.integers(0, 2**32 - 1), wild=st.booleans())
def test_packing_is_the_same_with_and_without_avx2(count: int, seed: int, wild: bool) -> None:
    draw = any_patterns if wild else normal
    gradient, residual = draw(count, seed=seed), draw(count, seed=seed + 1)
    one, kept = packed(one_bit_pack, gradient, residual)
    other, kept_too = packed(one_bit_pack_portable, gradient, residual)
    assert one == other
    assert kept.tobytes() == kept_too.tobytes()


@given(
    count=st.integers(0, 3000),
    terms=st.integers(1, 6),
    divisor=st.sampled_from([1.0, 2.0, 3.0, -7.5, 0.1]),
    wild=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_unpacking_is_the_mean_of_what_was_packed(
    count: int, terms: int, divisor: float, wild: bool, seed: int
) -> None:
    """The very bytes of ``mean_into``, whatever bytes arrive."""
    random = np.random.default_rng(seed)
    frames = [random.bytes(8 + -(-count // 8)) for _ in range(terms)]
    if not wild:
        frames = [packed(one_bit_pack, normal(count, seed=seed + k))[0] for k in range(terms)]
    expected = np.empty(count, np.float32)
    mean_into(expected, [decoded(frame, count) for frame in frames], "float32", divisor)
    for unpack in UNPACKS:
        out = np.full(count, 7, np.float32)
        unpack(out, frames, divisor)
        assert out.tobytes() == expected.tobytes(), unpack


@packs
@given(st.lists(st.tuples(FINITE, FINITE), max_size=40))
def test_what_is_not_sent_is_kept_and_rounded_once(
    pack: Callable[..., None], pairs: list[tuple[float, float]]
) -> None:
    """fp32 cannot always hold acc − decoded, but nothing nearer to it than what is kept."""
    gradient, residual = np.array(pairs, np.float32).reshape(-1, 2).T.copy()
    frame, kept = packed(pack, gradient, residual)
    acc = gradient + residual
    for a, sent, left in zip(acc, decoded(frame, acc.size), kept, strict=True):
        owed = Fraction(float(a)) - Fraction(float(sent))
        error = abs(owed - Fraction(float(left)))
        for neighbour in (np.nextafter(left, -np.inf), np.nextafter(left, np.inf)):
            assert error <= abs(owed - Fraction(float(neighbour)))
        assert abs(left) <= max(abs(a), abs(sent))  # they have one sign: residuals stay bounded


@packs
@given(st.lists(st.integers(-512, 512), min_size=1, max_size=64), st.integers(0, 2**32 - 1))
def test_over_dyadic_numbers_nothing_is_lost(
    pack: Callable[..., None], numbers: list[int], seed: int
) -> None:
    """Sums over a power of two: the means are short, and fp32 holds every difference."""
    random = np.random.default_rng(seed)
    size = 64
    gradient = np.resize(np.array(numbers, np.float32) / 64, size)
    signs = np.where(random.permutation(size) < size // 2, 1, -1)  # half of them each
    gradient = (np.abs(gradient) + np.float32(2**-6)) * signs.astype(np.float32)
    frame, kept = packed(pack, gradient)
    np.testing.assert_array_equal(decoded(frame, size) + kept, gradient)
    assert kept.sum(dtype=np.float64) == 0
    for scale, side in zip(scales(frame), (gradient < 0, gradient >= 0), strict=True):
        assert scale * 32 == gradient[side].sum(dtype=np.float64)


@packs
def test_what_was_kept_comes_the_next_time(pack: Callable[..., None]) -> None:
    """After many rounds of one gradient, all but the last residual has been sent."""
    gradient = normal(1000, seed=5)
    residual, sent = np.zeros_like(gradient), np.zeros(1000)
    for _ in range(50):
        frame, residual = packed(pack, gradient, residual)
        sent += decoded(frame, 1000)
    np.testing.assert_allclose(sent + residual, 50.0 * gradient, rtol=1e-4, atol=1e-4)
    assert np.abs(sent / 50 - gradient).mean() < 0.1 * np.abs(gradient).mean()


@packs
@pytest.mark.parametrize("count", [1, 8, 29])
@pytest.mark.parametrize(("sign", "place"), [(1, 1), (-1, 0)])
def test_where_all_have_one_sign_the_other_scale_is_zero(
    pack: Callable[..., None], count: int, sign: int, place: int
) -> None:
    frame, kept = packed(pack, np.full(count, 1.5 * sign, np.float32))
    assert scales(frame)[place] == 1.5 * sign
    assert scales(frame)[1 - place] == 0
    assert not kept.any()


@packs
def test_zeros_of_either_sign_are_set_and_leave_nothing(pack: Callable[..., None]) -> None:
    zeros = np.array([0.0, -0.0] * 9, np.float32)
    frame, kept = packed(pack, zeros)
    assert frame == bytes(8) + b"\xff\xff\x03"
    assert not kept.any()


@packs
@pytest.mark.parametrize("count", [1, 8, 21, 64])
@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (np.nan, (np.nan, np.nan)),
        (-np.nan, (np.nan, np.nan)),
        (np.inf, (None, np.inf)),
        (-np.inf, (-np.inf, None)),
    ],
)
@pytest.mark.parametrize("where", ["gradient", "residual"])
def test_what_is_not_finite_travels_and_does_not_stay(
    pack: Callable[..., None],
    count: int,
    bad: float,
    expected: tuple[float | None, float | None],
    where: str,
) -> None:
    for place in {0, count // 2, count - 1}:
        both = {"gradient": normal(count, seed=1), "residual": normal(count, seed=2)}
        both[where][place] = bad
        frame, kept = packed(pack, both["gradient"], both["residual"])
        for scale, wanted in zip(scales(frame), expected, strict=True):
            if wanted is None:
                assert np.isfinite(scale)
            else:
                np.testing.assert_array_equal(scale, np.float32(wanted))
        assert kept.tobytes() == both["residual"].tobytes()


@packs
def test_a_sum_beyond_fp32_is_infinite_and_a_mean_of_the_largest_is_not(
    pack: Callable[..., None],
) -> None:
    largest = np.full(100, np.finfo(np.float32).max)
    frame, kept = packed(pack, largest)
    assert scales(frame).tolist() == [0.0, largest[0]]
    assert not kept.any()
    assert np.isposinf(scales(packed(pack, largest, largest)[0])[1])


@given(st.lists(FLOATS, min_size=1, max_size=30))
def test_scales_are_finite_exactly_where_all_values_are(values: list[float]) -> None:
    frame, kept = packed(one_bit_pack, np.array(values, np.float32))
    assert np.isfinite(scales(frame)).all() == np.isfinite(values).all()
    assert np.isfinite(kept).all()


@packs
@unpacks
def test_unaligned_buffers(pack: Callable[..., None], unpack: Callable[..., None]) -> None:
    count = 2501
    gradient = normal(count, seed=1)
    frame, kept = packed(pack, gradient)
    rooms = [bytearray(b"\xee" * (nbytes + 10)) for nbytes in (len(frame), 4 * count, 4 * count)]
    rooms[1][3:-7] = gradient.tobytes()
    rooms[2][1:-9] = bytes(4 * count)
    out, source, residual = (
        memoryview(room)[shift : shift - 10 or None]
        for room, shift in zip(rooms, (5, 3, 1), strict=True)
    )
    pack(out, source, residual)
    assert bytes(out) == frame
    assert bytes(residual) == kept.tobytes()
    unpack(source, [out])
    assert bytes(source) == decoded(frame, count).tobytes()
    for room, shift in zip(rooms, (5, 3, 1), strict=True):
        assert room[:shift] == b"\xee" * shift
        assert room[shift - 10 :] == b"\xee" * (10 - shift)


def test_additions_keep_the_order_of_the_list() -> None:
    """In float32, 1e8 swallows a 1 that is added to it but not one added after it cancels."""
    big, one, minus = (packed(one_bit_pack, np.full(40, v, np.float32))[0] for v in (1e8, 1, -1e8))
    out = np.empty(40, np.float32)
    for unpack in UNPACKS:
        unpack(out, [big, one, minus])
        assert out.tolist() == [0.0] * 40
        unpack(out, [big, minus, one])
        assert out.tolist() == [1.0] * 40


ROOM = memoryview(bytearray(64))
NINE = bytes(9)


@packs
@pytest.mark.parametrize(
    ("out", "gradient", "residual", "message"),
    [
        (bytearray(9), bytes(6), bytearray(6), r"gradient has 6 bytes, not a multiple of the 4"),
        (bytearray(9), bytes(8), bytearray(4), r"residual has 4 bytes, gradient has 8"),
        (bytearray(8), bytes(8), bytearray(8), r"out has 8 bytes where 2 values take 9"),
        (bytearray(10), bytes(8), bytearray(8), r"out has 10 bytes where 2 values take 9"),
        (NINE, bytes(8), bytearray(8), r"out must be writable and C-contiguous"),
        (bytearray(9), bytes(8), bytes(8), r"residual must be writable and C-contiguous"),
        (ROOM[:9], ROOM[8:16], bytearray(8), r"must not overlap"),
        (ROOM[:9], bytes(8), ROOM[8:16], r"must not overlap"),
        (bytearray(9), ROOM[:8], ROOM[:8], r"must not overlap"),
    ],
)
def test_packing_refuses(
    pack: Callable[..., None], out: Any, gradient: Any, residual: Any, message: str
) -> None:
    before = bytes(out), bytes(residual)
    with pytest.raises(ValueError, match=message):
        pack(out, gradient, residual)
    assert (bytes(out), bytes(residual)) == before


@unpacks
@pytest.mark.parametrize(
    ("out", "inputs", "divisor", "message"),
    [
        (bytearray(8), [], 1.0, r"inputs must not be empty"),
        (bytearray(7), [NINE], 1.0, r"out has 7 bytes, not a multiple of the 4"),
        (bytearray(8), [NINE, bytes(8)], 1.0, r"inputs\[1\] has 8 bytes where 2 values take 9"),
        (bytearray(36), [NINE], 1.0, r"inputs\[0\] has 9 bytes where 9 values take 10"),
        (bytearray(8), [NINE], 0.0, r"divisor must be finite and nonzero"),
        (bytearray(8), [NINE], float("nan"), r"divisor must be finite and nonzero"),
        (bytes(8), [NINE], 1.0, r"out must be writable and C-contiguous"),
        (ROOM[:8], [ROOM[4:13]], 1.0, r"inputs\[0\] overlaps out"),
    ],
)
def test_unpacking_refuses(
    unpack: Callable[..., None],
    out: Any,
    inputs: Sequence[Any],
    divisor: float,
    message: str,
) -> None:
    before = bytes(out)
    with pytest.raises(ValueError, match=message):
        unpack(out, inputs, divisor)
    assert bytes(out) == before


def test_objects_without_a_buffer_are_named() -> None:
    with pytest.raises(TypeError, match="residual must offer the buffer protocol, not float"):
        one_bit_pack(bytearray(9), bytes(8), 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"inputs\[0\] must offer the buffer protocol, not str"):
        one_bit_unpack(bytearray(8), ["000000000"])  # type: ignore[list-item]
