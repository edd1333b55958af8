"""How many partitions links ask for, and how much an update counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.codecs import Rotate
from slipstream.errors import ConfigError
from slipstream.planning.slices import FULL, Load
from slipstream.updates import Add

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


@pytest.mark.parametrize("workers", [1, 4, 9])
def test_all_workers_together_move_as_far_as_was_asked(workers: int) -> None:
    assert workers * Add().coefficient(5, workers) == pytest.approx(1)
    assert workers * Add(growth="sqrt").coefficient(5, workers) == pytest.approx(workers**0.5)
    assert workers * Add(growth="linear").coefficient(5, workers) == pytest.approx(workers)


def test_growth_is_reached_gradually() -> None:
    steps = Add(growth="linear", warm_steps=10)
    assert [8 * steps.coefficient(step, 8) for step in (0, 5, 10, 99)] == pytest.approx(
        [1, 4.5, 8, 8]
    )


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (Rotate, {"partitions": 0}),
        (Rotate, {"partitions": 2.0}),
        (Add, {"growth": "cubic"}),
        (Add, {"warm_steps": -1}),
    ],
)
def test_what_makes_no_sense_is_refused(part: Any, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        part(**wrong)


def test_a_load_without_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes_s=0"):
        Load(1.0, 1.0, 2, 0)
