"""What every codec must do, whatever it makes of the values on the way.

A new codec joins by an entry in ``CODECS``.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream._native import mean_into
from slipstream.codecs import Above, AnyCodec, Codec, Dense, Drop, Filter, OneBit, Quantized
from slipstream.errors import FrameRefused
from slipstream.types import ITEM_BYTES, Buffer, EncodeContext, Spec, Values

CODECS: dict[str, Codec] = {
    "dense": Dense(),
    "dense-float32": Dense("float32"),
    "dense-bfloat16": Dense("bfloat16"),
    "dense-float16": Dense("float16"),
    "one-bit": OneBit(),
    "int8": Quantized(8, block=64),
    "int4": Quantized(4, block=32),
    "filter": Filter(Above(0.5)),
    # No float32 beyond this rounds to a bfloat16 within it, which would not travel again.
    "filter-bfloat16": Filter(Above(0.5 + 2**-9), values="bfloat16"),
    "filter-zstd": Filter(Above(Drop(0.9)), squeeze="zstd"),
}
EXACT = {"dense"}
FLOAT32 = ("float32",)
KEEP_RESIDUALS = ("one-bit", "filter", "int")
TAKES = {name: FLOAT32 for name in CODECS if name.startswith(KEEP_RESIDUALS)}  # else all
needs_cramjam = pytest.mark.skipif(
    find_spec("cramjam") is None, reason="squeezing needs cramjam: pip install cramjam"
)
MARKS = {"filter-zstd": [needs_cramjam]}
codecs = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, [])) for name in CODECS]
)
codecs_and_dtypes = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=MARKS.get(name, []))
        for name in CODECS
        for dtype in TAKES.get(name, ITEM_BYTES)
    ],
)
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


def sent(codec: Codec, content: Values, memory: Any = None) -> list[bytes]:
    """Over a link; without a memory, the first time."""
    if memory is None:
        memory = codec.init(content.numel, content.dtype)
    return received(codec.encode(content, memory, EncodeContext()))


def decoded(codec: Codec, frames: Sequence[Buffer], numel: int, dtype: str) -> Values:
    out = Values.empty(numel, dtype)
    codec.decode_into(frames, out)
    return out


def owed(memory: Any) -> Any:
    """What a codec's memory will still send."""
    return 0.0 if memory is None else memory.values.astype(np.float64)


@codecs_and_dtypes
@given(numel=NUMEL, seed=st.integers(0, 99))
def test_a_segment_takes_the_frames_it_says_and_passes_its_own_examination(
    name: str, dtype: str, numel: int, seed: int
) -> None:
    codec = CODECS[name]
    frames = sent(codec, values(numel, dtype, seed))
    assert len(frames) == codec.frames
    codec.examine(frames, numel, dtype)


@codecs_and_dtypes
@given(numel=NUMEL, seed=st.integers(0, 99), data=st.data())
def test_frames_of_another_length_are_refused(
    name: str, dtype: str, numel: int, seed: int, data: st.DataObject
) -> None:
    codec = CODECS[name]
    frames = sent(codec, values(numel, dtype, seed))
    which = data.draw(st.integers(0, codec.frames - 1))
    length = data.draw(st.integers(0, 2 * len(frames[which]) + 9))
    if length != len(frames[which]):
        frames[which] = bytes(length)
        with pytest.raises(FrameRefused):
            codec.examine(frames, numel, dtype)


@codecs_and_dtypes
@given(numel=NUMEL, seed=st.integers(0, 99))
def test_encoding_leaves_its_input_alone_and_is_repeatable(
    name: str, dtype: str, numel: int, seed: int
) -> None:
    codec, content = CODECS[name], values(numel, dtype, seed)
    before = content.data.copy()
    assert sent(codec, content) == sent(codec, content)
    np.testing.assert_array_equal(content.data, before)


@codecs_and_dtypes
@given(numel=NUMEL, seed=st.integers(0, 99))
def test_decoding_and_what_is_owed_come_close_and_twice_is_as_good_as_once(
    name: str, dtype: str, numel: int, seed: int
) -> None:
    codec, content = CODECS[name], values(numel, dtype, seed)
    memory = codec.init(numel, dtype)
    once = decoded(codec, sent(codec, content, memory), numel, dtype)
    twice = decoded(codec, sent(codec, once), numel, dtype)
    np.testing.assert_array_equal(once.data, twice.data)
    if name in EXACT:
        np.testing.assert_array_equal(once.data, content.data)
    kept = numbers(once) + owed(memory)
    np.testing.assert_allclose(kept, numbers(content), rtol=2**-8, atol=1e-6)


@codecs_and_dtypes
@given(numel=NUMEL, seed=st.integers(0, 99), rounds=st.integers(1, 6))
def test_over_rounds_everything_arrives_but_what_is_owed(
    name: str, dtype: str, numel: int, seed: int, rounds: int
) -> None:
    codec = CODECS[name]
    memory = codec.init(numel, dtype)
    given_, arrived = np.zeros(numel), np.zeros(numel)
    for round_ in range(rounds):
        content = values(numel, dtype, seed + round_)
        given_ += numbers(content)
        arrived += numbers(decoded(codec, sent(codec, content, memory), numel, dtype))
    np.testing.assert_allclose(arrived + owed(memory), given_, atol=rounds * 2**-6)


@codecs_and_dtypes
@given(
    numel=NUMEL,
    seed=st.integers(0, 99),
    workers=st.integers(1, 5),
    divisor=st.integers(1, 6),
)
def test_combining_is_the_sum_in_order_divided(
    name: str, dtype: str, numel: int, seed: int, workers: int, divisor: int
) -> None:
    codec = CODECS[name]
    frames = [sent(codec, values(numel, dtype, seed + i)) for i in range(workers)]
    out, again = Values.empty(numel, dtype), Values.empty(numel, dtype)
    codec.combine(frames, out, divisor=divisor)
    codec.combine(frames, again, divisor=divisor)
    np.testing.assert_array_equal(out.data, again.data)
    expected = sum(numbers(decoded(codec, one, numel, dtype)) for one in frames) / divisor
    np.testing.assert_allclose(numbers(out), expected, rtol=2**-7, atol=0.02 * workers)


@codecs_and_dtypes
@given(numel=st.integers(1, 300), seed=st.integers(0, 99))
def test_combining_one_is_decoding_it(name: str, dtype: str, numel: int, seed: int) -> None:
    codec = CODECS[name]
    frames = sent(codec, values(numel, dtype, seed))
    combined = Values.empty(numel, dtype)
    codec.combine([frames], combined, divisor=1.0)
    np.testing.assert_array_equal(combined.data, decoded(codec, frames, numel, dtype).data)


@codecs_and_dtypes
@given(numel=st.integers(2, 300), seed=st.integers(0, 99), cut=st.integers(1, 299))
def test_a_tensor_may_be_cut_where_the_codec_says_so(
    name: str, dtype: str, numel: int, seed: int, cut: int
) -> None:
    codec, content = CODECS[name], values(numel, dtype, seed)
    if not codec.splits:
        return
    cut = min(cut, numel - 1)
    whole = decoded(codec, sent(codec, content), numel, dtype)
    parts = Values.empty(numel, dtype)
    for start, stop in ((0, cut), (cut, numel)):
        part, memory = content.part(start, stop), codec.init(stop - start, dtype)
        codec.decode_into(sent(codec, part, memory), parts.part(start, stop))
        kept = numbers(parts.part(start, stop)) + owed(memory)
        np.testing.assert_allclose(kept, numbers(part), rtol=2**-8, atol=1e-6)
    if codec.init(numel, dtype) is None:
        np.testing.assert_array_equal(whole.data, parts.data)


@codecs
def test_recipes_are_frozen_values_that_can_be_told_to_a_server(name: str) -> None:
    codec = CODECS[name]
    assert codec.name == name
    told: Any = msgspec.json.decode(msgspec.json.encode(codec), type=AnyCodec)
    assert hash(codec) == hash(told)
    assert told == codec


@codecs
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_a_tensor_that_a_codec_does_not_take_is_refused_before_start(name: str, dtype: str) -> None:
    spec = Spec("w", (3, 4), dtype, 0)
    if dtype in TAKES.get(name, ITEM_BYTES):
        assert CODECS[name].obstacle(spec) == ""
    else:
        assert CODECS[name].obstacle(spec).startswith(f"it is {dtype}")


@codecs_and_dtypes
@given(numel=NUMEL, seed=st.integers(0, 99))
def test_a_contribution_that_is_put_back_was_never_sent(
    name: str, dtype: str, numel: int, seed: int
) -> None:
    codec, content = CODECS[name], values(numel, dtype, seed)
    memory = codec.init(numel, dtype)
    frames = sent(codec, content, memory)
    if memory is not None:
        memory.put_back(codec, frames)
        np.testing.assert_allclose(owed(memory), numbers(content), rtol=2**-20, atol=1e-6)


@codecs_and_dtypes
@given(numel=NUMEL, seed=st.integers(0, 99))
def test_what_is_not_lossy_arrives_as_it_was(name: str, dtype: str, numel: int, seed: int) -> None:
    codec, content = CODECS[name], values(numel, dtype, seed)
    if not codec.lossy:
        arrived = decoded(codec, sent(codec, content), numel, dtype)
        np.testing.assert_array_equal(arrived.data, content.data)


@codecs
def test_a_codec_of_segments_says_so(name: str) -> None:
    assert CODECS[name].form == "dense"
    assert "up: dense" in CODECS[name].facts()
