"""Averaged weights: how they follow, and what a checkpoint gives them."""

import torch
from torch import nn

from slipstream.torch.averages import Averages


def test_averages_of_a_checkpoint_may_be_of_layers_that_are_frozen_now() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    averages = Averages(model, 0.9, ["1.weight", "1.bias"])
    saved = {name: torch.full_like(p, 7.0) for name, p in model.named_parameters()}
    averages.load(saved)
    assert averages.weights.keys() == {"1.weight", "1.bias"}
    assert all(bool((value == 7).all()) for value in averages.weights.values())


def test_averages_that_a_checkpoint_has_not_stay_as_they_are() -> None:
    model = nn.Linear(2, 1)
    averages = Averages(model, 0.9, ["weight", "bias"])
    averages.load({"bias": torch.ones(1)})
    assert averages.weights["bias"].tolist() == [1.0]
    assert torch.equal(averages.weights["weight"], model.weight)
