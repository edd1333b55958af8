"""How many partitions links ask for, and how much an update counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.planning.slices import FULL, Load

positive = st.floats(1e-3, 1e9)


@given(steps_s=positive, model_bytes=positive, workers=st.integers(2, 500), bytes_s=positive)
def test_the_fewest_partitions_with_which_a_link_is_not_too_full(
    steps_s: float, model_bytes: float, workers: int, bytes_s: float
) -> None:
    load = Load(steps_s, model_bytes, workers, bytes_s)
    p = load.partitions()
    assert p == 1 or load.used_bytes_s(p) <= FULL * bytes_s * (1 + 1e-9)
    assert p == 1 or load.used_bytes_s(p - 1) > FULL * bytes_s * (1 - 1e-9)


def test_an_example_by_hand() -> None:
    """10 steps a second of 4 MB to 7 peers are 280 MB/s; a link of 25 MB/s bears 22.5 of them."""
    load = Load(10.0, 4e6, 8, 25e6)
    assert load.partitions() == math.ceil(280 / 22.5) == 13
    assert load.used_bytes_s(13) == pytest.approx(280e6 / 13)


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (Load(11.9, 4e6, 8, 25e6), False),
        (Load(12.1, 4e6, 8, 25e6), True),
        (Load(10.0, 4e6, 8, 20.5e6), False),
        (Load(10.0, 4e6, 8, 19.5e6), True),
        (Load(10.0, 4e6, 7, 25e6), True),
    ],
)
def test_a_fifth_or_another_worker_is_worth_a_change(other: Load, differs: bool) -> None:
    assert Load(10.0, 4e6, 8, 25e6).differs(other) is differs


def test_a_load_without_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes_s=0"):
        Load(1.0, 1.0, 2, 0)
