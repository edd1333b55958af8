"""Where everything lies in shared memory: nothing overlaps, everything is where it can be read."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.planning.segment import (
    FROZEN,
    LINE,
    SETTINGS,
    WORD,
    SegmentPlan,
    SharedTensor,
    settings_vector,
)

SIZES = {"float32": 4, "float64": 8, "int64": 8, "bfloat16": 2}


@st.composite
def tensors(draw: st.DrawFn) -> list[SharedTensor]:
    found = []
    for i in range(draw(st.integers(1, 8))):
        dtype = draw(st.sampled_from(sorted(SIZES)))
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        trained = dtype.startswith("float") and draw(st.booleans())
        in_rows = trained and len(shape) == 2 and math.prod(shape) > 0 and draw(st.booleans())
        group = draw(st.integers(0, 2)) if trained else FROZEN
        found.append(SharedTensor(f"t{i}", shape, dtype, SIZES[dtype], group, in_rows))
    return found


def apart(spans: list[tuple[int, int]]) -> bool:
    spans = sorted(span for span in spans if span[0] < span[1])
    return all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@given(tensors())
def test_nothing_overlaps_and_all_of_it_is_inside(model: list[SharedTensor]) -> None:
    plan = SegmentPlan.of(model, groups=3)
    weights = [(at, at + t.nbytes) for at, t in zip(plan.weights_at, model, strict=True)]
    assert apart(weights)
    assert all(at % LINE == 0 and end <= plan.weights_nbytes for at, end in weights)
    trained = [i for i, tensor in enumerate(model) if tensor.trained]
    assert [gradient.tensor for gradient in plan.gradients] == trained
    front = [
        (0, len(trained) * WORD),
        (plan.settings_at, plan.settings_at + 3 * SETTINGS * WORD),
        (plan.version_at, plan.version_at + WORD),
    ]
    assert plan.settings_at == len(trained) * WORD  # where the native update looks for them
    slot = list(front)
    for gradient in plan.gradients:
        tensor = model[gradient.tensor]
        slot.append((gradient.at, gradient.at + tensor.nbytes))
        assert gradient.at % LINE == 0
        assert bool(gradient.width) == tensor.in_rows
        if gradient.width:
            rows = tensor.numel // gradient.width
            slot.append((gradient.numbers_at, gradient.numbers_at + rows * WORD))
    assert apart(slot)
    assert max(end for _, end in slot) <= plan.slot_nbytes


@pytest.mark.parametrize(
    ("optimizer", "settings", "read"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, [0.1, 0.9, 0, 0, 1, 0, 0, 0]),
        (
            "AdamW",
            {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01},
            [1e-3, 0.9, 0.99, 1e-8, 0.01, 1, 0, 0],
        ),
        (
            "RMSprop",
            {"lr": 0.01, "alpha": 0.9, "eps": 1e-8, "centered": True, "maximize": None},
            [0.01, 0.9, 1e-8, 0, 0, 1, 0, 0],
        ),
    ],
)
def test_settings_in_the_order_of_their_rule(
    optimizer: str, settings: dict[str, object], read: list[float]
) -> None:
    assert settings_vector(optimizer, settings) == read
