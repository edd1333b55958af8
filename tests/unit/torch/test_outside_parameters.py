"""Optimizers that were not distributed, on parameters that train with a distributed model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from slipstream.torch.capture.outside_parameters import MOST_OPTIMIZERS, OutsideParameters

STEPS = 10


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


@pytest.fixture
def optimizer(model: nn.Module) -> SGD:
    return SGD(model.parameters(), 0.1)


@pytest.fixture
def outside(model: nn.Module, optimizer: SGD) -> Iterator[OutsideParameters]:
    watched = OutsideParameters(model.parameters(), [optimizer], is_first=True)
    yield watched
    watched.close()


def said(loop: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            loop()
    return [str(each.message) for each in found]


def test_criterion_with_an_own_optimizer_is_named_once(
    model: nn.Module, optimizer: SGD, outside: OutsideParameters
) -> None:
    criterion = nn.Linear(3, 1)
    second = SGD(criterion.parameters(), 0.1)

    def loop() -> None:
        optimizer.zero_grad()
        second.zero_grad()
        criterion(model(torch.ones(2, 4))).sum().backward()
        optimizer.step()
        second.step()

    (found,) = said(loop)
    assert found.startswith("SGD trains parameters that job.distribute was not given")
    assert "(group 0, parameter 0, of shape (1, 3))" in found
    assert "nn.ModuleDict" in found
    assert not model.weight._post_accumulate_grad_hooks


def test_criterion_that_nobody_steps_is_not_named(
    model: nn.Module, optimizer: SGD, outside: OutsideParameters
) -> None:
    criterion = nn.Linear(3, 1)

    def loop() -> None:
        optimizer.zero_grad()
        criterion(model(torch.ones(2, 4))).sum().backward()
        optimizer.step()

    assert said(loop) == []


def test_critic_that_trains_in_passes_of_its_own_is_not_named(
    model: nn.Module, optimizer: SGD, outside: OutsideParameters
) -> None:
    """A GAN with a local critic: the generator's pass adds to its gradients, which do not count."""
    critic = nn.Linear(3, 1)
    second = SGD(critic.parameters(), 0.1)

    def loop() -> None:
        optimizer.zero_grad()
        critic(model(torch.ones(2, 4))).sum().backward()
        optimizer.step()
        second.zero_grad()
        critic(model(torch.ones(2, 4)).detach()).sum().backward()
        second.step()

    assert said(loop) == []
    assert not model.weight._post_accumulate_grad_hooks, "what is known is watched no longer"
    assert not critic.weight._post_accumulate_grad_hooks


def test_another_optimizer_of_exchanged_parameters_is_not_named(
    model: nn.Module, optimizer: SGD, outside: OutsideParameters
) -> None:
    second = SGD([model.bias], 0.1)

    def loop() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        second.step()

    assert said(loop) == []


def test_number_of_watched_optimizers_has_a_limit(
    model: nn.Module, outside: OutsideParameters
) -> None:
    def loop() -> None:
        own = nn.Linear(2, 1)
        own(torch.ones(2)).sum().backward()
        SGD(own.parameters(), 0.1).step()

    for _ in range(4):
        assert said(loop) == []
    assert len(outside._watched) == MOST_OPTIMIZERS


def test_closed_watch_leaves_no_hooks(model: nn.Module, outside: OutsideParameters) -> None:
    own = nn.Linear(2, 1)
    own(torch.ones(2)).sum().backward()
    SGD(own.parameters(), 0.1).step()
    assert model.weight._post_accumulate_grad_hooks
    outside.close()
    assert not model.weight._post_accumulate_grad_hooks
    assert not own.weight._post_accumulate_grad_hooks
