"""The kernels against numpy and torch, bit for bit."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from slipstream._native import crc32c, crc32c_portable, mean_into

Array = np.ndarray[Any, Any]

# dtype -> the integer type of its bit pattern
BITS: dict[str, type[np.unsignedinteger[Any]]] = {
    "float32": np.uint32,
    "float64": np.uint64,
    "bfloat16": np.uint16,
    "float16": np.uint16,
}
CHECKSUMS = [crc32c, crc32c_portable]
# Around the kernel's block of 2048 elements, and the tails that vectors leave.
COUNTS = [0, 1, 2, 3, 7, 8, 15, 17, 31, 63, 65, 2047, 2048, 2049, 5000]


def as_torch(patterns: Array, dtype: str) -> torch.Tensor:
    signed = patterns.view(f"i{patterns.itemsize}")
    return torch.from_numpy(signed).view(getattr(torch, dtype))


def as_patterns(tensor: torch.Tensor, dtype: str) -> Array:
    signed = getattr(torch, f"int{8 * tensor.itemsize}")
    return tensor.view(signed).numpy().view(BITS[dtype])


def normal_values(count: int, dtype: str, *, seed: int) -> Array:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    return as_patterns(values.to(getattr(torch, dtype)), dtype)


def any_patterns(count: int, dtype: str, *, seed: int) -> Array:
    """Every bit pattern is as likely: subnormals, infinities and NaN included."""
    raw = np.random.default_rng(seed).bytes(count * np.dtype(BITS[dtype]).itemsize)
    return np.frombuffer(raw, BITS[dtype]).copy()


def reference(inputs: Sequence[Array], dtype: str, divisor: float) -> torch.Tensor:
    """The mean as the docstring words it: widen, add in order, divide, round once."""
    wide = torch.float64 if dtype == "float64" else torch.float32
    first, *rest = (as_torch(patterns, dtype).to(wide).numpy() for patterns in inputs)
    total = first.copy()
    with np.errstate(all="ignore"):
        for term in rest:
            total = total + term
        total = total / total.dtype.type(divisor)
    return torch.from_numpy(total).to(getattr(torch, dtype))


def mean(inputs: Sequence[Array], dtype: str, divisor: float) -> Array:
    out = np.full_like(inputs[0], 0x5A)
    mean_into(out, inputs, dtype, divisor)
    return out


def assert_same_bits(got: Array, expected: torch.Tensor, dtype: str) -> None:
    """Equal patterns; where the reference is NaN, the one NaN that the kernel writes."""
    quiet = as_patterns(torch.full((1,), torch.nan, dtype=expected.dtype), dtype)
    nan = torch.isnan(expected).numpy()
    np.testing.assert_array_equal(got, np.where(nan, quiet, as_patterns(expected, dtype)))


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("count", COUNTS)
def test_mean_of_three_at_every_tail(dtype: str, count: int) -> None:
    inputs = [normal_values(count, dtype, seed=k) for k in range(3)]
    assert_same_bits(mean(inputs, dtype, 3.0), reference(inputs, dtype, 3.0), dtype)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("terms", [1, 2, 4, 5, 16])
@pytest.mark.parametrize("divisor", [1.0, 3.0, 16.0, 0.1, -7.5])
def test_mean_of_any_number_of_inputs(dtype: str, terms: int, divisor: float) -> None:
    inputs = [normal_values(2500, dtype, seed=k) for k in range(terms)]
    assert_same_bits(mean(inputs, dtype, divisor), reference(inputs, dtype, divisor), dtype)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("divisor", [1.0, 3.0, 2.0**-10, 2.0**12])
def test_mean_of_arbitrary_bit_patterns(dtype: str, divisor: float) -> None:
    inputs = [any_patterns(100_000, dtype, seed=k) for k in range(2)]
    assert_same_bits(mean(inputs, dtype, divisor), reference(inputs, dtype, divisor), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 4096.0, 0.3])
def test_sixteen_bit_rounding_of_every_value(dtype: str, divisor: float) -> None:
    """Halving reaches the ties among subnormals, a divisor below one the overflow."""
    every = np.arange(2**16, dtype=np.uint16)
    assert_same_bits(mean([every], dtype, divisor), reference([every], dtype, divisor), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ties_round_to_even(dtype: str) -> None:
    """A value plus half its last place lies between two neighbours: the even one is taken."""
    ulp = torch.finfo(getattr(torch, dtype)).eps
    terms = torch.tensor([[1.0, 1.0 + ulp], [ulp / 2, ulp / 2]]).to(getattr(torch, dtype))
    inputs = [as_patterns(row, dtype) for row in terms]
    got = as_torch(mean(inputs, dtype, 1.0), dtype)
    assert got.tolist() == [1.0, 1.0 + 2 * ulp]


def test_additions_keep_the_order_of_the_list() -> None:
    """In float32, 1e8 swallows a 1 that is added to it but not one added after it cancels."""
    big, one = np.full(40, 1e8, np.float32), np.ones(40, np.float32)
    out = np.empty_like(one)
    mean_into(out, [big, one, -big], "float32", 1.0)
    assert out.tolist() == [0.0] * 40
    mean_into(out, [big, -big, one], "float32", 1.0)
    assert out.tolist() == [1.0] * 40


def test_division_is_not_a_multiplication_by_the_reciprocal() -> None:
    values = np.arange(1, 5001, dtype=np.float32)
    out = np.empty_like(values)
    mean_into(out, [values], "float32", 3.0)
    assert (out != values * np.float32(1 / 3)).any()
    np.testing.assert_array_equal(out, values / np.float32(3))


@pytest.mark.parametrize("dtype", BITS)
def test_infinities_nan_and_signed_zeros(dtype: str) -> None:
    inf, nan = torch.inf, torch.nan
    left = torch.tensor([inf, inf, -inf, nan, 1.0, -0.0, 0.0]).to(getattr(torch, dtype))
    right = torch.tensor([1.0, -inf, -inf, 1.0, nan, -0.0, -0.0]).to(getattr(torch, dtype))
    inputs = [as_patterns(side, dtype) for side in (left, right)]
    got = as_torch(mean(inputs, dtype, 2.0), dtype).to(torch.float64).numpy()
    expected = np.array([inf, nan, -inf, nan, nan, -0.0, 0.0])
    np.testing.assert_array_equal(got, expected)
    zeros = expected == 0
    np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(expected[zeros]))


@pytest.mark.parametrize("dtype", BITS)
def test_which_nan_comes_first_does_not_show(dtype: str) -> None:
    """Processors pass on different payloads; replicas must not come to differ by them."""
    nan = as_patterns(torch.full((33,), torch.nan, dtype=getattr(torch, dtype)), dtype)
    sign = BITS[dtype](1 << (8 * nan.itemsize - 1))
    one, other = nan | BITS[dtype](1), nan | sign | BITS[dtype](2)
    np.testing.assert_array_equal(mean([one, other], dtype, 1.0), nan)
    np.testing.assert_array_equal(mean([other, one], dtype, 1.0), nan)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("place", range(3))
def test_out_may_be_one_of_the_inputs(dtype: str, place: int) -> None:
    inputs = [normal_values(5000, dtype, seed=k) for k in range(3)]
    expected = reference(inputs, dtype, 3.0)
    mean_into(inputs[place], inputs, dtype, 3.0)
    assert_same_bits(inputs[place], expected, dtype)


@pytest.mark.parametrize("dtype", BITS)
def test_unaligned_buffers(dtype: str) -> None:
    inputs = [normal_values(2500, dtype, seed=k) for k in range(3)]
    nbytes = inputs[0].nbytes
    shifted = []
    for shift, patterns in enumerate(inputs, start=1):
        room = bytearray(nbytes + shift)
        room[shift:] = patterns.tobytes()
        shifted.append(memoryview(room)[shift:])
    room = bytearray(b"\xee" * (nbytes + 10))
    mean_into(memoryview(room)[5:-5], shifted, dtype, 3.0)
    assert room[:5] == room[-5:] == b"\xee" * 5
    got = np.frombuffer(room[5:-5], BITS[dtype])
    assert_same_bits(got, reference(inputs, dtype, 3.0), dtype)


def test_any_kind_of_buffer() -> None:
    raw = np.arange(6, dtype=np.float32).tobytes()
    inputs: list[Any] = [
        raw,
        bytearray(raw),
        memoryview(raw),
        zmq.Frame(raw).buffer,
        np.frombuffer(raw, np.uint8),
        np.frombuffer(raw, np.float32).reshape(2, 3),
    ]
    out = bytearray(len(raw))
    mean_into(out, inputs, "float32", len(inputs))
    assert out == raw
    assert {crc32c(data) for data in inputs} == {crc32c(raw)}


def test_torch_memory_is_written_in_place() -> None:
    weights = torch.zeros(4)
    mean_into(weights.numpy(), (np.ones(4, np.float32), np.ones(4, np.float32)), "float32", 4)
    assert weights.tolist() == [0.5] * 4


FOUR = bytes(4)
STRIDED = memoryview(bytes(16))[::2]
OVERLAPPED = memoryview(bytearray(24))


@pytest.mark.parametrize(
    ("out", "inputs", "dtype", "divisor", "message"),
    [
        (bytearray(4), [], "float32", 1.0, r"inputs must not be empty"),
        (bytearray(4), [FOUR, bytes(8)], "float32", 1.0, r"inputs\[1\] has 8 bytes, out has 4"),
        (bytearray(6), [bytes(6)], "float32", 1.0, r"out has 6 bytes, not a multiple of the 4"),
        (bytearray(3), [bytes(3)], "bfloat16", 1.0, r"out has 3 bytes, not a multiple of the 2"),
        (bytearray(4), [FOUR], "int32", 1.0, r"dtype must be float32, .* or float16, not 'int32'"),
        (bytearray(4), [FOUR], "float32", 0.0, r"divisor must be finite and nonzero .* not 0\.0"),
        (bytearray(4), [FOUR], "float16", 1e-60, r"divisor must be .* not 1e-60"),
        (bytearray(4), [FOUR], "float32", float("nan"), r"divisor must be .* not nan"),
        (FOUR, [FOUR], "float32", 1.0, r"out must be writable and C-contiguous: "),
        (bytearray(8), [STRIDED], "float32", 1.0, r"inputs\[0\] must be C-contiguous: "),
        (OVERLAPPED[:16], [OVERLAPPED[8:]], "float32", 1.0, r"inputs\[0\] overlaps out without"),
    ],
)
def test_mean_refuses(out: Any, inputs: Any, dtype: str, divisor: float, message: str) -> None:
    before = bytes(out)
    with pytest.raises(ValueError, match=message):
        mean_into(out, inputs, dtype, divisor)
    assert bytes(out) == before


def test_tiny_divisor_is_fine_where_it_is_not_zero() -> None:
    out = np.zeros(1)
    mean_into(out, [np.array([1e-60])], "float64", 1e-60)
    assert out.tolist() == [1.0]


def test_objects_without_a_buffer_are_named() -> None:
    with pytest.raises(TypeError, match=r"inputs\[1\] must offer the buffer protocol, not float"):
        mean_into(bytearray(4), [FOUR, 1.5], "float32", 1.0)  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"data must offer the buffer protocol, not str"):
        crc32c("123456789")  # type: ignore[arg-type]


@pytest.mark.parametrize("checksum", CHECKSUMS)
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"a", 0xC1D04330),
        (b"123456789", 0xE3069283),
        # RFC 3720, appendix B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_crc32c_known_values(checksum: Any, data: bytes, expected: int) -> None:
    assert checksum(data) == expected


@given(nbytes=st.integers(0, 5000), shift=st.integers(0, 7), seed=st.integers(0, 2**32 - 1))
def test_crc32c_is_the_same_with_and_without_the_instruction(
    nbytes: int, shift: int, seed: int
) -> None:
    room = np.random.default_rng(seed).bytes(nbytes + shift)
    data = memoryview(room)[shift:]
    assert crc32c(data, seed) == crc32c_portable(data, seed)


# Three streams of 8192 bytes make a long stretch, three of 256 a short one.
@pytest.mark.parametrize("nbytes", [767, 768, 769, 24575, 24576, 24577, 49152 + 768 + 9, 2**21])
def test_crc32c_is_the_same_across_stretches(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert crc32c(data) == crc32c_portable(data)


@given(data=st.binary(max_size=3000), cut=st.integers(0, 3000))
def test_crc32c_chains(data: bytes, cut: int) -> None:
    for checksum in CHECKSUMS:
        assert checksum(data[cut:], checksum(data[:cut])) == checksum(data)


@pytest.mark.parametrize("checksum", CHECKSUMS)
def test_crc32c_refuses(checksum: Any) -> None:
    with pytest.raises(ValueError, match="data must be C-contiguous: "):
        checksum(STRIDED)
    with pytest.raises(TypeError):
        checksum(b"", -1)
    with pytest.raises(TypeError):
        checksum(b"", 2**32)


# --- out_dtype: one kernel converts as well

DTYPES = ("float32", "float64", "bfloat16", "float16")


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_out_dtype_sums_in_the_wider_precision_and_rounds_once(source: str, target: str) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(5000, generator=generator, dtype=torch.float64).to(getattr(torch, source))
        for _ in range(3)
    ]
    wide = torch.float64 if "float64" in (source, target) else torch.float32
    expected = ((inputs[0].to(wide) + inputs[1].to(wide) + inputs[2].to(wide)) / 3).numpy()
    out = torch.empty(5000, dtype=getattr(torch, target))
    raw = [tensor.view(torch.uint8).numpy() for tensor in inputs]
    mean_into(out.view(torch.uint8).numpy(), raw, source, 3.0, target)
    correct = [nearest(value, target) for value in expected]
    assert out.to(torch.float64).tolist() == correct


def nearest(value: float, dtype: str) -> float:
    """``value`` rounded once, half to even, to a format's fraction (normal numbers only)."""
    bits = {"float32": 24, "float64": 53, "bfloat16": 8, "float16": 11}[dtype]
    smallest_exponent = {"float16": -14}.get(dtype, -126)
    exact = Fraction(float(value))
    if not exact:
        return 0.0
    exponent = max(math.frexp(float(value))[1] - 1, smallest_exponent)
    unit = Fraction(2) ** (exponent - bits + 1)
    return float(round(exact / unit) * unit)


def test_float64_to_bfloat16_does_not_round_twice() -> None:
    value = np.array([1 + 2.0**-8 + 2.0**-40])
    out = bytearray(2)
    mean_into(out, [value.view(np.uint8)], "float64", 1.0, "bfloat16")
    assert int.from_bytes(out, "little") == 0x3F81
