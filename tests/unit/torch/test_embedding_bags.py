"""Gradients of ``nn.EmbeddingBag`` in rows, against torch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from slipstream.torch.tensors.compact_layers import (
    CompactLayer,
    Ports,
    capture,
    named_forms,
    shape_of,
)

ROWS, WIDTH = 6, 3


def table_of(layer: CompactLayer) -> Tensor:
    """The dense gradient that the captured rows stand for."""
    taken = layer.take()
    dense = torch.zeros(layer.module.weight.shape)
    return dense if taken is None else dense.index_add_(0, taken.first, taken.second)


def check(module: nn.EmbeddingBag, ids: Tensor, *more: Any, exact: bool) -> None:
    with torch.no_grad():
        module.weight.copy_(torch.randint(-3, 4, module.weight.shape).float())
    plain = copy.deepcopy(module)
    layer = CompactLayer(shape_of("bags", module, "rows"), module, 0, None)
    ports = Ports(
        may_take=lambda _: True,
        entered=lambda *_: None,
        takes=lambda _: True,
        captured=lambda _: None,
        finished=lambda _: None,
    )
    end = capture([layer], ports)
    given = copy.deepcopy(more)
    outputs = [one(ids, *own) for one, own in ((module, more), (plain, given))]
    assert torch.equal(*outputs)
    upstream = torch.randint(-3, 4, outputs[0].shape).float()
    for output in outputs:
        (output * upstream).sum().backward()
    layer.pending += [use for uses in layer._open.values() for use in uses]
    assert plain.weight.grad is not None
    assert module.weight.grad is None
    rows, wanted = table_of(layer), plain.weight.grad.to_dense()
    assert torch.equal(rows, wanted) if exact else torch.allclose(rows, wanted, atol=1e-6)
    for one, other in zip(more, given, strict=True):
        if one is not None and one.requires_grad:
            assert torch.equal(one.grad, other.grad)
    end()
    assert isinstance(module.forward.__func__, type(nn.EmbeddingBag.forward))


IDS = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=12)


@given(
    ids=IDS,
    cuts=st.lists(st.integers(0, 12), max_size=4),
    mode=st.sampled_from(["sum", "mean"]),
    padding=st.sampled_from([None, 2, -1]),
    last=st.booleans(),
)
def test_bags_end_to_end(
    ids: list[int], cuts: list[int], mode: str, padding: int | None, last: bool
) -> None:
    offsets = sorted({0, *(cut for cut in cuts)}) + ([0, 0] if not cuts else [])
    offsets = sorted(min(cut, len(ids)) for cut in offsets) + ([len(ids)] if last else [])
    module = nn.EmbeddingBag(ROWS, WIDTH, mode=mode, padding_idx=padding, include_last_offset=last)
    check(module, torch.tensor(ids), torch.tensor(offsets), exact=mode == "sum")


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_one_row_per_bag(mode: str, dtype: torch.dtype) -> None:
    ids = torch.tensor([[1, 1, 4], [0, 5, 1]], dtype=dtype)
    check(nn.EmbeddingBag(ROWS, WIDTH, mode=mode), ids, exact=mode == "sum")


def test_weights_of_single_ids_get_their_gradient() -> None:
    module = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=1)
    shares = torch.tensor([2.0, -1.0, 3.0, 1.0], requires_grad=True)
    check(module, torch.tensor([1, 4, 4, 0]), torch.tensor([0, 3]), shares, exact=True)


def test_the_maximum_stays_dense() -> None:
    model = nn.Sequential(nn.EmbeddingBag(3, 3, mode="max"), nn.EmbeddingBag(3, 3))
    (_, _, _, why), (_, _, form, none) = named_forms(model)
    assert (form, none) == ("rows", "")
    assert "maximum" in why
