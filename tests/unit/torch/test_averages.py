"""Averaged weights: how they follow, and what a checkpoint gives them."""

import pytest
import torch
from torch import nn

import slipstream
from slipstream.torch.tensors.averages import Averages
from slipstream.updates import Ema


def test_averages_of_a_checkpoint_may_be_of_layers_that_are_frozen_now() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    averages = Averages(model, Ema(0.9), ["1.weight", "1.bias"])
    saved = {name: torch.full_like(p, 7.0) for name, p in model.named_parameters()}
    averages.load(saved)
    assert averages.weights.keys() == {"1.weight", "1.bias"}
    assert all(bool((value == 7).all()) for value in averages.weights.values())


def test_averages_begin_with_weights_that_the_loop_loads_before_its_first_step() -> None:
    model = nn.Linear(2, 1)
    with slipstream.init() as job:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = job.distribute(model, optimizer, "push_pull(averaged=0.9)")
        model.load_state_dict({"weight": torch.full((1, 2), 100.0), "bias": torch.ones(1)})
        for _ in range(2):
            with job.averaged_weights():
                assert model.weight.tolist() == [[100.0, 100.0]]
            model(torch.ones(2)).backward()
            optimizer.step()


@pytest.mark.parametrize("decay", [0.25, 0.9])
def test_averages_keep_the_share_of_decay(decay: float) -> None:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 8.0)
    weight = average = 8.0
    with slipstream.init() as job:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = job.distribute(model, optimizer, f"push_pull(averaged={decay})")
        for gradient in (4.0, -2.0):
            optimizer.zero_grad()
            model(torch.full((1,), gradient, dtype=torch.float64)).backward()
            optimizer.step()
            weight -= gradient
            average = decay * average + (1 - decay) * weight
            with job.averaged_weights():
                assert model.weight.item() == pytest.approx(average)
            assert model.weight.item() == weight


def test_averages_of_a_checkpoint_stay_until_the_first_update() -> None:
    model = nn.Linear(2, 1)
    averages = Averages(model, Ema(0.5), ["weight"])
    averages.load({"weight": torch.full((1, 2), 4.0)})
    averages.before_update()
    with torch.no_grad():
        model.weight.fill_(2.0)
    averages.follow()
    assert averages.weights["weight"].tolist() == [[3.0, 3.0]]


def test_averages_that_a_checkpoint_has_not_stay_as_they_are() -> None:
    model = nn.Linear(2, 1)
    averages = Averages(model, Ema(0.9), ["weight", "bias"])
    averages.load({"bias": torch.ones(1)})
    assert averages.weights["bias"].tolist() == [1.0]
    assert torch.equal(averages.weights["weight"], model.weight)
