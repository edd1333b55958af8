from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.apps.bench.transformer import Gpt
from slipstream.errors import ConfigError

SIZES = {"layers": 2, "width": 16, "heads": 4, "context": 8}


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_no_position_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    model = Gpt(11, **SIZES)
    rows = torch.randint(11, (3, 8))
    changed = rows.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(rows), model(changed)
    assert before.shape == (3, 8, 11)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(2).any()


def test_it_begins_by_guessing() -> None:
    torch.manual_seed(0)
    rows, targets = torch.randint(50, (2, 16, 8))
    loss = F.cross_entropy(Gpt(50, **SIZES)(rows).flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(math.log(50), rel=0.05)


def test_it_has_the_sizes_it_is_told() -> None:
    width, context, symbols = 16, 8, 11
    block = 12 * width**2 + 13 * width  # 4 matrices with biases, 2 norms
    rest = context * width + 2 * width
    untied = parameters(Gpt(symbols, **SIZES))
    assert untied == 2 * block + rest + 2 * symbols * width
    assert parameters(Gpt(symbols, **SIZES, tied=True)) == untied - symbols * width


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"layers": 0}, "gpt: layers=0; take at least 1"),
        ({"context": 0}, "gpt: context=0"),
        ({"heads": 3}, "a width of 16 does not divide into 3 heads; take width=15"),
        ({"heads": 32}, "take width=32"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Gpt(11, **{**SIZES, **sizes})
