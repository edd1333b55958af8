"""One bit a value: sizes, refusals, and the memory that makes good what is lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import floats

from slipstream.codecs import OneBit
from slipstream.errors import FrameRefused
from slipstream.types import Spec, Values

CODEC = OneBit()


def test_a_segment_becomes_two_means_and_its_signs() -> None:
    memory = CODEC.init(5, "float32")
    (frame,) = CODEC.encode(floats(1, -2, 3, -4, 2), memory)
    assert bytes(frame) == np.array([-3, 2], "<f4").tobytes() + bytes([0b10101])
    assert memory.values.tolist() == [-1, 1, 1, -1, 0]


def test_the_second_time_the_residual_is_sent_too() -> None:
    memory = CODEC.init(4, "float32")
    CODEC.encode(floats(4, 0, -1, -1), memory)
    assert memory.values.tolist() == [2, -2, 0, 0]
    out = Values.empty(4, "float32")
    CODEC.decode_into(CODEC.encode(floats(0, 0, 0, 0), memory), out)
    # The two zeros count among what is not negative.
    np.testing.assert_array_equal(out.data.view(np.float32), np.float32([2 / 3, -2, 2 / 3, 2 / 3]))


def test_a_round_that_is_not_finite_is_seen_and_then_forgotten() -> None:
    memory = CODEC.init(3, "float32")
    CODEC.encode(floats(4, 2, -1), memory)
    out = Values.empty(3, "float32")
    CODEC.decode_into(CODEC.encode(floats(np.nan, 1, 1), memory), out)
    assert np.isnan(out.data.view(np.float32)).all()
    assert memory.values.tolist() == [1, -1, 0]


@given(st.integers(0, 100), st.integers(0, 40))
def test_only_the_announced_size_passes(numel: int, nbytes: int) -> None:
    right = 8 + (numel + 7) // 8
    assert OneBit.nbytes(numel) == right
    CODEC.examine([bytes(right)], numel, "float32")
    if nbytes != right:
        with pytest.raises(FrameRefused, match=f"{nbytes} bytes where {numel} values take {right}"):
            CODEC.examine([bytes(nbytes)], numel, "float32")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "int64"])
def test_other_dtypes_are_refused_with_the_way_out(dtype: str) -> None:
    told = CODEC.obstacle(Spec("w", (2, 2), dtype, 0))
    assert told.startswith(f"it is {dtype}")
    assert told.endswith("route it to Dense()")


def test_what_was_dropped_returns_to_the_residual() -> None:
    memory = CODEC.init(5, "float32")
    frames = CODEC.encode(floats(1, -2, 3, -4, 2), memory)
    memory.put_back(CODEC, [bytes(memoryview(frame)) for frame in frames])
    assert memory.values.tolist() == [1, -2, 3, -4, 2]
