"""The largest magnitude against torch, over any values of any format."""

from typing import Any

import numpy as np
import pytest
import torch

from slipstream._native import largest

# The tails that vectors leave.
COUNTS = [0, 1, 2, 7, 8, 15, 16, 17, 31, 63, 64, 65, 1000]
FORMATS = ["float32", "float64", "bfloat16", "float16"]


def as_bytes(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("count", COUNTS)
def test_as_torch_finds_it(dtype: str, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    values = (100 * torch.randn(count, generator=generator)).to(getattr(torch, dtype))
    expected = float(values.double().abs().amax()) if count else 0.0
    assert largest(as_bytes(values), dtype) == expected


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("place", [0, 40, 98])
def test_one_value_that_is_not_finite_is_found_anywhere(dtype: str, place: int) -> None:
    finfo = torch.finfo(getattr(torch, dtype))
    values = torch.full((99,), finfo.max, dtype=getattr(torch, dtype))
    assert largest(as_bytes(values), dtype) == finfo.max
    values[place] = -torch.inf
    assert largest(as_bytes(values), dtype) == torch.inf
    values[98 - place] = torch.nan
    assert np.isnan(largest(as_bytes(values), dtype))


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_smallest_values_count(dtype: str) -> None:
    tiny = torch.zeros(3, dtype=getattr(torch, dtype))
    tiny.view(getattr(torch, f"int{8 * tiny.itemsize}"))[1] = 1
    assert largest(as_bytes(tiny), dtype) == float(tiny[1].double()) > 0


def test_memory_of_any_alignment() -> None:
    raw = np.zeros(4 * 33 + 1, np.uint8)
    raw[1:].view(np.uint8)[-4:] = np.frombuffer(np.float32(-2.5).tobytes(), np.uint8)
    assert largest(raw[1:], "float32") == 2.5


def test_what_is_no_whole_number_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes, not a multiple of the 4 of a float32"):
        largest(bytes(7), "float32")
    with pytest.raises(ValueError, match="dtype must be"):
        largest(bytes(8), "int64")
