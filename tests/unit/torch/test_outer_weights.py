"""Outer weights: their format, and what a worker's outer gradient is measured from."""

import pytest
import torch
from torch import nn

from slipstream.torch.checkpoints.outer_weights import OuterWeights
from slipstream.torch.tensors.inventory import Inventory
from slipstream.updates import Nesterov


def outer_of(model: nn.Module, lr: float = 0.7, momentum: float = 0.9) -> OuterWeights:
    return OuterWeights(Inventory.of(model), Nesterov(lr, momentum))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_updates_of_weights_in_16_bits_add_up(dtype: torch.dtype) -> None:
    model = nn.Linear(1, 1, bias=False).to(dtype)
    nn.init.constant_(model.weight, 1.0)
    outer = outer_of(model, lr=1.0, momentum=0.0)
    (tensor,) = outer.weights
    for _ in range(100):
        outer.update(tensor, torch.full((1, 1), 1e-4, dtype=dtype))
    assert outer.weights[tensor].dtype == torch.float32
    assert outer.weights[tensor].item() == pytest.approx(0.99, abs=1e-4)
    assert outer.copies()["weight"].dtype == dtype


def test_a_worker_that_has_not_moved_contributes_nothing_though_its_weights_are_rounded() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.constant_(model.weight, 1.0)
    outer = outer_of(model)
    (tensor,) = outer.weights
    outer.weights[tensor].fill_(1.001)  # which bfloat16 has not
    model.weight.data.copy_(outer.seen(tensor))
    assert (outer.seen(tensor) - model.weight).abs().max() == 0
    assert outer.loaded() == []
    assert outer.weights[tensor].item() == pytest.approx(1.001)


def test_outer_weights_follow_weights_that_the_loop_loads() -> None:
    model = nn.Linear(2, 2)
    outer = outer_of(model)
    nn.init.constant_(model.weight, 3.0)
    loaded = outer.loaded()
    assert len(loaded) == 1
    outer.follow(loaded)
    assert torch.equal(outer.copies()["weight"], model.weight)
    assert outer.loaded() == []


@pytest.mark.parametrize("momentum", [0.9, 0.5, 0.0])
def test_outer_update_matches_nesterov_of_torch(momentum: float) -> None:
    """Δ is the mean outer gradient: v ← μ v + Δ, θ ← θ − η (Δ + μ v)."""
    model = nn.Linear(3, 2, bias=False).double()
    theirs = model.weight.detach().clone().requires_grad_()
    outer = outer_of(model, lr=0.7, momentum=momentum)
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    (tensor,) = outer.weights
    for _ in range(3):
        theirs.grad = torch.randn_like(theirs)
        outer.update(tensor, theirs.grad)
        sgd.step()
        torch.testing.assert_close(outer.weights[tensor], theirs.detach(), rtol=0, atol=1e-14)


def test_precise_weights_and_momenta_come_back_from_a_checkpoint() -> None:
    model = nn.Linear(3, 2).bfloat16()
    outer, again = outer_of(model), outer_of(model)
    for tensor in outer.weights:
        outer.update(tensor, torch.randn_like(outer.seen(tensor)))
    again.begin(outer.momenta_by_name(), outer.precise())
    for tensor, value in outer.weights.items():
        assert torch.equal(again.weights[tensor], value)
        assert torch.equal(again.momenta[tensor], outer.momenta[tensor])


def test_weights_of_32_bits_and_more_need_no_second_format() -> None:
    assert outer_of(nn.Linear(2, 2).double()).precise() == {}
