"""Few bits a value: both kernels against numpy, bit for bit, and what is kept against fractions."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream._native import (
    mean_into,
    quantize_pack,
    quantize_pack_portable,
    quantize_unpack,
    quantize_unpack_portable,
    quantized_nbytes,
)

Array = np.ndarray[Any, Any]
PACKS: list[Callable[..., None]] = [quantize_pack, quantize_pack_portable]
UNPACKS: list[Callable[..., None]] = [quantize_unpack, quantize_unpack_portable]
packs = pytest.mark.parametrize("pack", PACKS)
unpacks = pytest.mark.parametrize("unpack", UNPACKS)
all_bits = pytest.mark.parametrize("bits", [8, 4])
# Around the lanes of a vector, the values that a vector packs, and blocks.
COUNTS = [0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 95, 1000, 4097]
BLOCKS = [32, 96, 4096]
MOST = {8: 127, 4: 7}


def normal(count: int, *, seed: int, size: float = 1.0) -> Array:
    return (size * np.random.default_rng(seed).normal(size=count)).astype(np.float32)


def any_patterns(count: int, *, seed: int) -> Array:
    """Every bit pattern is as likely: subnormals, infinities and NaN included."""
    return np.frombuffer(np.random.default_rng(seed).bytes(4 * count), np.float32).copy()


def packed(
    pack: Callable[..., None],
    gradient: Array,
    residual: Array,
    bits: int,
    block: int,
    seed: int | None = None,
) -> tuple[bytes, Array]:
    """The bytes, and the residual afterwards."""
    kept = residual.copy()
    out = np.full(quantized_nbytes(gradient.size, bits, block), 0x5A, np.uint8)
    pack(out, gradient, kept, bits, block, seed)
    return out.tobytes(), kept


def unpacked(frame: bytes, count: int, bits: int, block: int) -> Array:
    out = np.full(count, 7, np.float32)
    quantize_unpack(out, [frame], bits, block)
    return out


def scales(frame: bytes, count: int, block: int) -> Array:
    return np.frombuffer(frame[: 4 * -(-count // block)], "<f4")


def codes(frame: bytes, count: int, bits: int, block: int) -> Array:
    raw = np.frombuffer(frame[4 * -(-count // block) :], np.int8)
    if bits == 8:
        return raw
    halves = np.stack([raw & 15, raw.view(np.uint8) >> 4], axis=1).ravel()[:count].astype(np.int8)
    return (halves ^ 8) - 8


def expected(acc: Array, bits: int, block: int) -> tuple[Array, Array]:
    """Scales and codes of finite values, as numpy finds them."""
    found_scales, found_codes = [], []
    for start in range(0, acc.size, block):
        part = acc[start : start + block]
        largest = np.abs(part).max()
        scale = np.float32(largest) / np.float32(MOST[bits])
        scale = (np.array([scale]).view(np.uint32) & ~np.uint32(0x7F)).view(np.float32)[0]
        if largest < np.float32(1e-30):
            scale = np.float32(0)
        inverse = np.float32(1) / scale if scale else np.float32(0)
        found_scales.append(scale)
        found_codes.append(np.rint(part * inverse).astype(np.int8))
    return np.array(found_scales, np.float32), np.concatenate(found_codes)


@packs
@all_bits
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("count", COUNTS[1:])
def test_scales_codes_and_what_is_kept_are_those_of_numpy(
    pack: Callable[..., None], bits: int, block: int, count: int
) -> None:
    gradient, residual = normal(count, seed=count), normal(count, seed=count + 1, size=0.3)
    frame, kept = packed(pack, gradient, residual, bits, block)
    acc = gradient + residual
    wanted_scales, wanted_codes = expected(acc, bits, block)
    np.testing.assert_array_equal(scales(frame, count, block), wanted_scales)
    np.testing.assert_array_equal(codes(frame, count, bits, block), wanted_codes)
    sent = wanted_codes.astype(np.float32) * np.repeat(wanted_scales, block)[:count]
    np.testing.assert_array_equal(kept, acc - sent)
    np.testing.assert_array_equal(unpacked(frame, count, bits, block), sent)


@all_bits
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("count", COUNTS)
def test_both_kernels_give_the_same_bytes(bits: int, seed: int | None, count: int) -> None:
    for make in (normal, any_patterns):
        gradient, residual = make(count, seed=count), normal(count, seed=count + 1)
        with np.errstate(all="ignore"):
            results = [packed(pack, gradient, residual, bits, 64, seed) for pack in PACKS]
        (frame, kept), (other, other_kept) = results
        assert frame == other
        assert kept.tobytes() == other_kept.tobytes()
        outs = [np.empty(count, np.float32) for _ in UNPACKS]
        for unpack, out in zip(UNPACKS, outs, strict=True):
            unpack(out, [frame, frame, other], bits, 64, 3.0)
        assert outs[0].tobytes() == outs[1].tobytes()


@all_bits
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=70),
    st.integers(0, 99),
)
def test_to_nearest_nothing_is_lost_to_the_last_bit(
    bits: int, numbers: list[float], seed: int
) -> None:
    """Sent and kept add up to what was there, as fractions."""
    gradient = np.array(numbers, np.float32)
    residual = normal(gradient.size, seed=seed)
    acc = gradient + residual
    frame, kept = packed(quantize_pack, gradient, residual, bits, 32)
    sent = unpacked(frame, gradient.size, bits, 32)
    for value, left, whole in zip(sent.tolist(), kept.tolist(), acc.tolist(), strict=True):
        assert Fraction(value) + Fraction(left) == Fraction(whole)


@packs
@all_bits
def test_what_is_not_finite_arrives_alone_and_does_not_stay(
    pack: Callable[..., None], bits: int
) -> None:
    gradient = np.float32([1, np.nan, -2, np.inf, 3, -np.inf] + [0.5] * 60)
    residual = np.full(66, 0.25, np.float32)
    frame, kept = packed(pack, gradient, residual, bits, 32)
    sent = unpacked(frame, 66, bits, 32)
    np.testing.assert_array_equal(sent[:6], np.float32([0, np.nan, 0, np.inf, 0, -np.inf]))
    np.testing.assert_array_equal(kept[:6], np.float32([1.25, 0.25, -1.75, 0.25, 3.25, 0.25]))
    assert (sent[6:32] == 0).all()
    assert (kept[6:32] == 0.75).all(), "they wait"
    np.testing.assert_allclose(sent[32:] + kept[32:], 0.75)
    assert sent[32] != 0, "another block is not held up"


@packs
@all_bits
def test_values_too_small_to_scale_stay(pack: Callable[..., None], bits: int) -> None:
    tiny = np.float32([1e-31, -1e-45, 0, 1e-38])
    frame, kept = packed(pack, tiny, np.zeros(4, np.float32), bits, 32, 3)
    np.testing.assert_array_equal(kept, tiny)
    np.testing.assert_array_equal(unpacked(frame, 4, bits, 32), np.zeros(4))


@packs
@all_bits
@pytest.mark.parametrize("seed", [None, 1])
def test_the_largest_numbers_do_not_overflow(
    pack: Callable[..., None], bits: int, seed: int | None
) -> None:
    most = np.finfo(np.float32).max
    frame, kept = packed(pack, np.float32([most, -most]), np.zeros(2, np.float32), bits, 32, seed)
    sent = unpacked(frame, 2, bits, 32)
    assert np.isfinite(sent).all()
    assert np.isfinite(kept).all()
    np.testing.assert_allclose(sent, [most, -most], rtol=1e-4)


@packs
@all_bits
def test_by_chance_the_expected_value_is_the_value(pack: Callable[..., None], bits: int) -> None:
    gradient = np.linspace(-1, 1, 64, dtype=np.float32)
    nothing = np.zeros(64, np.float32)
    draws = np.array(
        [
            unpacked(packed(pack, gradient, nothing, bits, 64, seed)[0], 64, bits, 64)
            for seed in range(2000)
        ]
    )
    step = 1 / MOST[bits]
    assert np.abs(draws - gradient).max() < step * 1.001, "up or down by one step at most"
    # Six standard errors of 2,000 draws of a step at most.
    np.testing.assert_allclose(draws.mean(axis=0), gradient, atol=6 * step / 2 / 2000**0.5)
    assert (draws != draws[0]).any()


def test_chance_differs_by_seed_place_and_values() -> None:
    gradient = np.full(256, 0.3, np.float32)
    gradient[::64] = 1  # so that 0.3 lies between two codes, in blocks that are alike
    drawn = {
        name: codes(packed(quantize_pack, each, 0 * each, 4, 64, seed)[0], 256, 4, 64)
        for name, each, seed in (
            ("one", gradient, 1),
            ("again", gradient, 1),
            ("other seed", gradient, 2),
            ("other values", gradient * np.float32(1.5), 1),
        )
    }
    assert (drawn["one"] == drawn["again"]).all()
    for other in ("other seed", "other values"):
        assert (drawn["one"] != drawn[other]).any()
    blocks = drawn["one"].reshape(4, 64)
    assert (blocks[0] != blocks[1]).any(), "blocks that are alike"


@unpacks
@all_bits
@pytest.mark.parametrize("count", COUNTS[1:])
@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_unpacking_is_the_mean_kernel_of_the_inputs_unpacked(
    unpack: Callable[..., None], bits: int, count: int, divisor: float
) -> None:
    frames = [
        packed(
            quantize_pack,
            any_patterns(count, seed=count + i),
            np.zeros(count, np.float32),
            bits,
            32,
        )[0]
        for i in range(3)
    ]
    for inputs in (frames, frames[:1]):
        out, wanted = np.full(count, 7, np.float32), np.empty(count, np.float32)
        unpack(out, inputs, bits, 32, divisor)
        each = [unpacked(frame, count, bits, 32) for frame in inputs]
        mean_into(wanted, each, "float32", divisor)
        assert out.tobytes() == wanted.tobytes()


@all_bits
@given(st.binary(min_size=4 * 2 + 40, max_size=4 * 2 + 40))
def test_any_bytes_of_the_right_size_can_be_unpacked(bits: int, raw: bytes) -> None:
    count = 40 if bits == 8 else 64
    frame = raw[: quantized_nbytes(count, bits, 32)]
    outs = [np.empty(count, np.float32) for _ in UNPACKS]
    for unpack, out in zip(UNPACKS, outs, strict=True):
        unpack(out, [frame, frame], bits, 32, 2.0)
    assert outs[0].tobytes() == outs[1].tobytes()


@packs
@all_bits
def test_without_a_residual_nothing_is_added(pack: Callable[..., None], bits: int) -> None:
    gradient = normal(100, seed=0)
    out = np.empty(quantized_nbytes(100, bits, 32), np.uint8)
    pack(out, gradient, None, bits, 32)
    assert out.tobytes() == packed(pack, gradient, np.zeros(100, np.float32), bits, 32)[0]


@packs
def test_what_does_not_fit_is_refused_by_name(pack: Callable[..., None]) -> None:
    gradient, room = normal(64, seed=0), np.empty(quantized_nbytes(64, 8, 32), np.uint8)
    with pytest.raises(ValueError, match="bits must be 4 or 8, not 3"):
        pack(room, gradient, None, 3, 32)
    for block in (0, 33, 4128):
        with pytest.raises(ValueError, match=f"block must be a multiple of 32.*not {block}"):
            pack(room, gradient, None, 8, block)
    with pytest.raises(ValueError, match="out has 71 bytes where 64 values take 72"):
        pack(room[:71], gradient, None, 8, 32)
    with pytest.raises(ValueError, match="residual has 252 bytes, gradient has 256"):
        pack(room, gradient, np.zeros(63, np.float32), 8, 32)
    with pytest.raises(ValueError, match="must not overlap"):
        pack(room, gradient, gradient, 8, 32)


@unpacks
def test_frames_that_do_not_fit_are_refused_by_name(unpack: Callable[..., None]) -> None:
    out = np.empty(64, np.float32)
    with pytest.raises(ValueError, match=r"inputs\[1\] has 71 bytes where 64 values take 72"):
        unpack(out, [bytes(72), bytes(71)], 8, 32)
    with pytest.raises(ValueError, match="inputs must not be empty"):
        unpack(out, [], 8, 32)
    with pytest.raises(ValueError, match="divisor"):
        unpack(out, [bytes(72)], 8, 32, 0.0)
