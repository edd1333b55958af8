"""Outer weights: their format, and what a worker's outer gradient is measured from."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.outer_optimizers import SGD, Adam, Nesterov, OuterOptimizer
from slipstream.torch.checkpoints.checkpoint import Checkpoint
from slipstream.torch.checkpoints.outer_weights import OuterWeights
from slipstream.torch.checkpoints.saved_outer_state import (
    check_outer_states,
    outer_states,
    outer_tensors,
)
from slipstream.torch.tensors.inventory import Inventory


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
    again.begin(outer.states_by_name(), outer.precise())
    for tensor, value in outer.weights.items():
        assert torch.equal(again.weights[tensor], value)
        assert again.states[tensor].keys() == {"momentum_buffer"}
        momenta = [each.states[tensor]["momentum_buffer"] for each in (again, outer)]
        np.testing.assert_array_equal(*momenta)


def test_weights_of_32_bits_and_more_need_no_second_format() -> None:
    assert outer_of(nn.Linear(2, 2).double()).precise() == {}


class Turned(nn.Module):
    """A parameter of complex numbers, one of real ones, and a number alone."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn((), dtype=torch.float64))


def trained(outer: OuterOptimizer, model: nn.Module, rounds: int) -> OuterWeights:
    weights = OuterWeights(Inventory.of(model), outer)
    for _ in range(rounds):
        advance(weights)
    return weights


def advance(weights: OuterWeights) -> None:
    for tensor, theta in weights.weights.items():
        weights.update(tensor, theta * 0.25 + 1.0)


EVERY = [SGD(0.5), Nesterov(0.5, 0.9), Adam(0.1)]


@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_outer_optimizer_goes_on_from_a_checkpoint(optimizer: OuterOptimizer) -> None:
    """Complex numbers, too, whose state is that of their parts."""
    model = Turned()
    outer = trained(optimizer, model, 2)
    saved = outer_tensors(outer.states_by_name())
    check_outer_states(outer_states(saved), model)
    for name, theta in outer.copies().items():
        dict(model.named_parameters())[name].data.copy_(theta)
    again = OuterWeights(Inventory.of(model), optimizer)
    again.begin(outer_states({name: tensor.clone() for name, tensor in saved.items()}))
    advance(outer)
    advance(again)
    for tensor, theta in outer.weights.items():
        assert torch.equal(again.weights[tensor], theta)


def test_number_alone_keeps_its_momentum() -> None:
    """Numpy makes plain numbers of arrays without dimensions, which cannot change in place."""
    model = Turned()
    theirs = model.bias.detach().clone().requires_grad_()
    sgd = torch.optim.SGD([theirs], lr=0.5, momentum=0.9, nesterov=True)
    outer = OuterWeights(Inventory.of(model), Nesterov(0.5, 0.9))
    (bias,) = (i for i, w in outer.weights.items() if not w.ndim)
    for _ in range(3):
        theirs.grad = torch.ones_like(theirs)
        outer.update(bias, theirs.grad)
        sgd.step()
    torch.testing.assert_close(outer.weights[bias], theirs.detach(), rtol=1e-14, atol=1e-14)


def test_state_of_another_outer_optimizer_begins_anew() -> None:
    model = Turned()
    saved = trained(Nesterov(), model, 2).states_by_name()
    again = OuterWeights(Inventory.of(model), Adam())
    again.begin(saved)
    assert again.states == {}
    again.begin({"gone": {}} | saved)
    assert again.states == {}


def test_parameters_of_real_and_complex_numbers_take_the_same_adam() -> None:
    """Adam divides real and imaginary parts by their own sizes, as torch's does."""
    model = Turned()
    begun = model.turn.detach().clone().requires_grad_()
    theirs = torch.optim.Adam([begun], lr=0.1, betas=(0.9, 0.99))
    outer = OuterWeights(Inventory.of(model), Adam(0.1))
    (turn,) = (i for i, w in outer.weights.items() if w.is_complex())
    for _ in range(3):
        begun.grad = torch.randn(5, dtype=torch.complex128)
        outer.update(turn, begun.grad)
        theirs.step()
    torch.testing.assert_close(outer.weights[turn], begun.detach(), rtol=1e-12, atol=1e-12)


KEPT = Path(__file__).parents[2] / "checkpoints" / "kept" / "diloco.safetensors"


def test_momentum_of_a_kept_checkpoint_is_loaded() -> None:
    tensors = Checkpoint.read(KEPT).tensors
    states = outer_states(tensors)
    weights = {n.removeprefix("model/") for n in tensors if n.endswith(("weight", "bias"))}
    assert {name for name in weights if "/" not in name} == states.keys()
    for name, entries in states.items():
        assert entries.keys() == {"momentum_buffer"}
        assert entries["momentum_buffer"].shape == tensors[f"model/{name}"].shape
        assert entries["momentum_buffer"].count_nonzero() > 0


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("outer/gone", torch.ones(5), "'gone', which the model has not"),
        ("outer state/exp_avg/gone", torch.ones(5), "'gone', which the model has not"),
        ("outer state/exp_avg", torch.ones(5), "'', which the model has not"),
        ("outer/scale", torch.ones(4).double(), r"'momentum_buffer' of 'scale' is \(4,\)"),
        ("outer state/exp_avg/scale", torch.ones(5), "'exp_avg' of 'scale' is"),
        ("outer state/step/scale", torch.ones(5).double(), "'step' of 'scale' is"),
        ("outer state/step/scale", torch.tensor(-1.0).double(), "'step' of 'scale' is -1.0"),
        ("outer state/step/scale", torch.tensor(float("nan")).double(), "of 'scale' is nan"),
    ],
)
def test_outer_state_that_does_not_fit_is_refused(
    name: str, tensor: torch.Tensor, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        check_outer_states(outer_states({name: tensor}), Turned())
