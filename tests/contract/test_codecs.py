"""What every codec must do, whatever it makes of the values on the way.

A new codec joins by an entry in ``CODECS``.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream._native import mean_into
from slipstream.codecs import Codec, Dense
from slipstream.errors import FrameRefused
from slipstream.strategy import describe, rebuild
from slipstream.types import ITEM_BYTES, Buffer, Spec, Values

CODECS: dict[str, Codec] = {
    "dense": Dense(),
    "dense-float32": Dense("float32"),
    "dense-bfloat16": Dense("bfloat16"),
    "dense-float16": Dense("float16"),
}
EXACT = {"dense"}
codecs = pytest.mark.parametrize("name", CODECS)
DTYPES = st.sampled_from(list(ITEM_BYTES))
NUMEL = st.integers(0, 300)


def values(numel: int, dtype: str, seed: int) -> Values:
    numbers = np.random.default_rng(seed).normal(size=numel)
    out = Values.empty(numel, dtype)
    mean_into(out.data, [numbers], "float64", 1.0, out_dtype=dtype)
    return out


def numbers(content: Values) -> np.ndarray:
    """As float64, whatever they were."""
    out = Values.empty(content.numel, "float64")
    mean_into(out.data, [content.data], content.dtype, 1.0, out_dtype="float64")
    return out.data.view(np.float64)


def received(frames: tuple[Buffer, ...]) -> list[bytes]:
    """As they come off a link: other memory, read-only."""
    return [bytes(memoryview(frame)) for frame in frames]


@codecs
@given(numel=NUMEL, dtype=DTYPES, seed=st.integers(0, 99))
def test_a_segment_takes_the_frames_it_says_and_passes_its_own_examination(
    name: str, numel: int, dtype: str, seed: int
) -> None:
    codec = CODECS[name]
    frames = codec.encode(values(numel, dtype, seed))
    assert len(frames) == codec.frames
    codec.examine(received(frames), numel, dtype)


@codecs
@given(numel=NUMEL, dtype=DTYPES, seed=st.integers(0, 99), data=st.data())
def test_frames_of_another_length_are_refused(
    name: str, numel: int, dtype: str, seed: int, data: st.DataObject
) -> None:
    codec = CODECS[name]
    frames = received(codec.encode(values(numel, dtype, seed)))
    which = data.draw(st.integers(0, codec.frames - 1))
    length = data.draw(st.integers(0, 2 * len(frames[which]) + 9))
    if length != len(frames[which]):
        frames[which] = bytes(length)
        with pytest.raises(FrameRefused):
            codec.examine(frames, numel, dtype)


@codecs
@given(numel=NUMEL, dtype=DTYPES, seed=st.integers(0, 99))
def test_encoding_leaves_its_input_alone_and_is_repeatable(
    name: str, numel: int, dtype: str, seed: int
) -> None:
    codec, content = CODECS[name], values(numel, dtype, seed)
    before = content.data.copy()
    assert received(codec.encode(content)) == received(codec.encode(content))
    np.testing.assert_array_equal(content.data, before)


@codecs
@given(numel=NUMEL, dtype=DTYPES, seed=st.integers(0, 99))
def test_decoding_comes_close_and_twice_is_as_good_as_once(
    name: str, numel: int, dtype: str, seed: int
) -> None:
    codec, content = CODECS[name], values(numel, dtype, seed)
    once, twice = Values.empty(numel, dtype), Values.empty(numel, dtype)
    codec.decode_into(received(codec.encode(content)), once)
    codec.decode_into(received(codec.encode(once)), twice)
    np.testing.assert_array_equal(once.data, twice.data)
    if name in EXACT:
        np.testing.assert_array_equal(once.data, content.data)
    np.testing.assert_allclose(numbers(once), numbers(content), rtol=2**-8, atol=1e-6)


@codecs
@given(
    numel=NUMEL,
    dtype=DTYPES,
    seed=st.integers(0, 99),
    workers=st.integers(1, 5),
    divisor=st.integers(1, 6),
)
def test_combining_is_the_sum_in_order_divided(
    name: str, numel: int, dtype: str, seed: int, workers: int, divisor: int
) -> None:
    codec = CODECS[name]
    given_ = [values(numel, dtype, seed + i) for i in range(workers)]
    sent = [received(codec.encode(content)) for content in given_]
    out, again = Values.empty(numel, dtype), Values.empty(numel, dtype)
    codec.combine(sent, out, divisor=divisor)
    codec.combine(sent, again, divisor=divisor)
    np.testing.assert_array_equal(out.data, again.data)
    expected = sum(numbers(content) for content in given_) / divisor
    np.testing.assert_allclose(numbers(out), expected, rtol=2**-7, atol=0.02 * workers)


@codecs
@given(numel=st.integers(1, 300), dtype=DTYPES, seed=st.integers(0, 99))
def test_combining_one_is_decoding_it(name: str, numel: int, dtype: str, seed: int) -> None:
    codec = CODECS[name]
    frames = received(codec.encode(values(numel, dtype, seed)))
    combined, decoded = Values.empty(numel, dtype), Values.empty(numel, dtype)
    codec.combine([frames], combined, divisor=1.0)
    codec.decode_into(frames, decoded)
    np.testing.assert_array_equal(combined.data, decoded.data)


@codecs
@given(numel=st.integers(2, 300), dtype=DTYPES, seed=st.integers(0, 99), cut=st.integers(1, 299))
def test_a_tensor_may_be_cut_where_the_codec_says_so(
    name: str, numel: int, dtype: str, seed: int, cut: int
) -> None:
    codec, content = CODECS[name], values(numel, dtype, seed)
    if not codec.splits:
        return
    cut = min(cut, numel - 1)
    whole, parts = Values.empty(numel, dtype), Values.empty(numel, dtype)
    codec.decode_into(received(codec.encode(content)), whole)
    for start, stop in ((0, cut), (cut, numel)):
        frames = received(codec.encode(content.part(start, stop)))
        codec.decode_into(frames, parts.part(start, stop))
    np.testing.assert_array_equal(whole.data, parts.data)


@codecs
def test_recipes_are_frozen_values_that_can_be_told_to_a_server(name: str) -> None:
    codec = CODECS[name]
    assert codec.name == name
    assert hash(codec) == hash(rebuild(describe(codec)))
    assert rebuild(describe(codec)) == codec
    for dtype in ITEM_BYTES:
        codec.check(Spec("w", (3, 4), dtype, 0))
