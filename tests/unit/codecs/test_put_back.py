"""A contribution that was dropped returns to its residual, but for what is not finite."""

import numpy as np
import pytest
from samples import floats

from slipstream.codecs import Above, Filter, OneBit
from slipstream.types import EncodeContext


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_does_not_stay(bad: float) -> None:
    for codec in (OneBit(), Filter(Above(0.1, decay="constant"))):
        memory = codec.init(4, "float32")
        frames = codec.encode(floats(1.0, -1.0, bad, 0.05), memory, EncodeContext())
        memory.put_back(codec, frames)
        assert np.isfinite(memory.values).all(), codec


def test_a_filter_has_everything_again() -> None:
    codec = Filter(Above(0.5, decay="constant"))
    memory = codec.init(4, "float32")
    frames = codec.encode(floats(1.0, -1.0, 0.25, 0.125), memory, EncodeContext())
    memory.put_back(codec, frames)
    assert memory.values.tolist() == [1.0, -1.0, 0.25, 0.125]


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_nothing_returns_of_signs_whose_mean_is_not_finite(bad: float) -> None:
    """The mean of the others is finite, but none of the contribution had entered the residual."""
    codec = OneBit()
    memory = codec.init(3, "float32")
    frames = codec.encode(floats(1.0, -2.0, bad), memory, EncodeContext())
    memory.put_back(codec, frames)
    assert memory.values.tolist() == [0, 0, 0]
