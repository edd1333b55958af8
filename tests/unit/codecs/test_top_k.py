"""The largest entries travel: how many, which of equal ones, and in how many bytes."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.codecs import Filter, TopK
from slipstream.codecs.select import kth_largest
from slipstream.errors import ConfigError
from slipstream.types import HERE, Values

FORMATS: list[Any] = ["float32", "bfloat16", "int8", "int4"]


def encoded(codec: Filter, values: Any, kept: Any = None) -> tuple[bytes, Any, Any]:
    """The frame, what it holds, and the residual afterwards."""
    residual = codec.init(values.size, "float32")
    if kept is not None:
        residual.values[:] = kept
    (frame,) = codec.encode(Values(values.view(np.uint8), "float32"), residual, HERE)
    codec.examine([frame], values.size, "float32")
    sent = Values.empty(values.size, "float32")
    codec.decode_into([frame], sent)
    return bytes(frame), sent.data.view(np.float32), residual.values


@given(
    share=st.floats(0.001, 1.0),
    sizes=st.lists(st.integers(-6, 6), min_size=1, max_size=200),
    kept=st.integers(0, 3),
)
def test_exactly_the_largest_travel_and_of_equal_ones_the_first(
    share: float, sizes: list[int], kept: int
) -> None:
    """Zeros do not: there is nothing to send."""
    values, before = np.array(sizes, np.float32), np.float32(kept)
    acc = values + before
    k = math.ceil(share * len(sizes))
    largest = sorted(range(len(sizes)), key=lambda i: (-abs(acc[i]), i))[:k]
    wanted = np.zeros_like(values)
    wanted[largest] = acc[largest]
    _, sent, left = encoded(Filter(TopK(share)), values, before)
    np.testing.assert_array_equal(sent, wanted)
    np.testing.assert_array_equal(left, acc - wanted)


@pytest.mark.parametrize("values", FORMATS)
@given(seed=st.integers(0, 1000), share=st.floats(0.01, 1))
def test_sent_and_kept_are_exactly_what_was_given_and_kept(
    values: Any, seed: int, share: float
) -> None:
    """Over several times, with what rounding left of the times before."""
    numbers = np.random.default_rng(seed)
    codec, kept = Filter(TopK(share), values=values), np.zeros(150, np.float32)
    for _ in range(4):
        given_ = numbers.normal(size=150).astype(np.float32)
        acc = given_ + kept
        _, sent, kept = encoded(codec, given_, kept)
        np.testing.assert_array_equal(sent.astype(np.float64) + kept, acc.astype(np.float64))
        assert np.count_nonzero(sent) <= math.ceil(share * 150)


@given(seed=st.integers(0, 1000), share=st.floats(0.0001, 1), kind=st.integers(0, 2))
def test_the_bound_is_that_of_all_entries_and_not_of_a_sample(
    seed: int, share: float, kind: int
) -> None:
    """Also where a sample misleads: sorted entries, and large ones that it does not see."""
    numbers = np.random.default_rng(seed)
    size = int(numbers.integers(1, 30_000))
    magnitudes = np.abs(numbers.normal(size=size)).astype(np.float32)
    if kind == 1:
        magnitudes.sort()
    if kind == 2:
        magnitudes[:: max(1, size // 4096) | 1] = 100
    k = math.ceil(share * size)
    assert kth_largest(k, magnitudes) == np.sort(magnitudes)[size - k]


def test_at_least_one_travels() -> None:
    _, sent, _ = encoded(Filter(TopK(1e-6)), np.float32([0.25, -3, 3]))
    assert sent.tolist() == [0, -3, 0]


@pytest.mark.parametrize("values", FORMATS)
def test_what_is_not_finite_always_travels(values: Any) -> None:
    given_ = np.ones(100, np.float32)
    given_[[3, 30, 60]] = np.nan, np.inf, -np.inf
    _, sent, kept = encoded(Filter(TopK(0.01), values=values), given_)
    np.testing.assert_array_equal(sent[[3, 30, 60]], given_[[3, 30, 60]])
    assert np.count_nonzero(sent) == 3
    assert np.isfinite(kept).all()
    assert kept.sum() == 97


def test_nothing_is_sent_of_nothing() -> None:
    _, sent, kept = encoded(Filter(TopK(0.5), values="int4"), np.zeros(64, np.float32))
    assert not sent.any()
    assert not kept.any()
    encoded(Filter(TopK(0.5)), np.zeros(0, np.float32))


@pytest.mark.parametrize(
    ("values", "most"),
    [("float32", 0.0140), ("bfloat16", 0.009), ("int8", 0.0062), ("int4", 0.005)],
)
def test_one_percent_takes_few_bytes(values: Any, most: float) -> None:
    """Against dense fp32. An index takes 10 bits, of 8 that no code could do without."""
    given_ = np.random.default_rng(0).normal(size=1 << 18).astype(np.float32)
    frame, sent, _ = encoded(Filter(TopK(0.01), values=values), given_)
    assert np.count_nonzero(sent) > 0.009 * given_.size
    assert len(frame) / given_.nbytes < most


@pytest.mark.parametrize("share", [0, 0.0, -0.1, 1.01, math.nan, math.inf, "1%", True, None])
def test_a_share_that_makes_no_sense_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match=r"TopK\(share=.*above 0 and at most 1, such as 0.01"):
        TopK(share)


@pytest.mark.parametrize("values", ["int3", "int2", 4, None])
def test_formats_that_there_are_not_are_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match="choose one of float32, bfloat16, int8, int4"):
        Filter(TopK(0.1), values=values)
