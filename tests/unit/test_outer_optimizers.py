"""Outer optimizers: their equations, the same bits with and without torch, and their state."""

from typing import Any, get_args

import numpy as np
import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.outer_optimizers import SGD, Adam, AnyOuterOptimizer, Nesterov, OuterOptimizer
from slipstream.outer_optimizers.outer_optimizer import zeros_like

EVERY: list[OuterOptimizer] = [
    SGD(0.5),
    Nesterov(0.7, 0.9),
    Nesterov(1.0, 0.0),
    Adam(0.1, 0.8, 0.95, 1e-6),
]


def theirs(outer: OuterOptimizer, theta: torch.Tensor) -> torch.optim.Optimizer:
    """Torch's optimizer with the same equation."""
    match outer:
        case SGD():
            return torch.optim.SGD([theta], outer.lr)
        case Nesterov():
            nesterov = outer.momentum > 0
            return torch.optim.SGD([theta], outer.lr, momentum=outer.momentum, nesterov=nesterov)
        case Adam():
            betas = (outer.beta1, outer.beta2)
            return torch.optim.Adam([theta], outer.lr, betas=betas, eps=outer.eps)
    raise AssertionError(f"{outer} has no equal")


def gradients(numbers: int = 5) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(40, 7, generator=random, dtype=torch.float64) for _ in range(numbers)]


@pytest.mark.parametrize("outer", EVERY, ids=repr)
def test_outer_optimizer_matches_torch(outer: OuterOptimizer) -> None:
    theta = torch.ones(40, 7, dtype=torch.float64)
    parameter = torch.nn.Parameter(theta.clone())
    reference, state = theirs(outer, parameter), outer.init(theta)
    for gradient in gradients():
        outer.update(theta, gradient, state)
        parameter.grad = gradient.clone()
        reference.step()
        torch.testing.assert_close(theta, parameter.detach(), rtol=1e-14, atol=1e-14)


def test_every_outer_optimizer_is_compared() -> None:
    assert {*map(type, EVERY)} == set(get_args(AnyOuterOptimizer))


@pytest.mark.parametrize("outer", EVERY, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numpy_and_torch_compute_the_same(outer: OuterOptimizer, dtype: torch.dtype) -> None:
    """The same bits, but for square roots, of which torch rounds some otherwise."""
    theta = torch.linspace(-2, 2, 280, dtype=dtype).view(40, 7)
    array = theta.numpy().copy()
    here, there = outer.init(theta), outer.init(array)
    for gradient in gradients():
        given = gradient.to(dtype)
        outer.update(theta, given, here)
        outer.update(array, given.numpy(), there)
    off = 1e-5 if isinstance(outer, Adam) else 0.0
    np.testing.assert_allclose(theta.numpy(), array, rtol=off, atol=0)
    for name, value in here.items():
        np.testing.assert_array_equal(value, there[name])


@pytest.mark.parametrize("outer", EVERY, ids=repr)
def test_pieces_of_a_tensor_are_updated_as_the_whole(outer: OuterOptimizer) -> None:
    """Servers hold pieces of tensors."""
    whole = np.linspace(-1, 1, 280, dtype=np.float32)
    pieces = [whole[:99].copy(), whole[99:].copy()]
    states = [outer.init(each) for each in (whole, *pieces)]
    for gradient in gradients():
        given = gradient.flatten().float().numpy()
        parts = (given, given[:99], given[99:])
        for theta, part, state in zip((whole, *pieces), parts, states, strict=True):
            outer.update(theta, part, state)
    assert whole.tobytes() == np.concatenate(pieces).tobytes()


@pytest.mark.parametrize("outer", EVERY, ids=repr)
def test_outer_gradient_is_not_changed(outer: OuterOptimizer) -> None:
    theta, (gradient,) = torch.ones(40, 7, dtype=torch.float64), gradients(1)
    before = gradient.clone()
    outer.update(theta, gradient, outer.init(theta))
    assert torch.equal(gradient, before)


def test_state_begins_with_zero_though_weights_are_infinite() -> None:
    assert zeros_like(np.float32([np.inf, np.nan])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: SGD(0.0), "lr=0.0: give an outer learning rate above 0"),
        (lambda: Adam(float("inf")), "give an outer learning rate above 0"),
        (lambda: Adam(beta1=1.0), "beta1=1.0: choose at least 0 and below 1"),
        (lambda: Adam(beta2=-0.1), "beta2=-0.1: choose at least 0 and below 1"),
        (lambda: Adam(eps=0.0), "eps=0.0: give a number above 0"),
        (lambda: SGD(at="peers"), "choose 'worker' or 'server'"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why.replace("(", r"\(")):
        make()
