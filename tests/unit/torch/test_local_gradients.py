"""Gradients that were sent, and those of parameters that nobody exchanges."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from slipstream.errors import RuntimeFault
from slipstream.torch.capture.local_gradients import LocalGradients
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.torch.tensors.inventory import Inventory


def test_unheld_parameters_are_refused_by_name_unless_they_are_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    head, backbone = model[1], model[0]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    gradients = LocalGradients(Inventory.of(head), FiniteGradients(), None)
    gradients.unheld = [("0.weight", backbone.weight)]
    gradients.refuse_unknown(optimizer)
    backbone.weight.grad = torch.ones(2, 2)
    with pytest.raises(RuntimeFault, match=r"'0\.weight'"):
        gradients.refuse_unknown(optimizer)
    backbone.weight.requires_grad_(False)  # its gradient is of an earlier phase
    gradients.refuse_unknown(optimizer)


@pytest.mark.parametrize("changed", [False, True])
def test_gradients_that_were_sent_are_not_kept_after_the_step(changed: bool) -> None:
    layer = nn.Linear(2, 1, bias=False)
    gradients = LocalGradients(Inventory.of(layer), FiniteGradients(), None)
    layer.weight.grad = torch.ones(1, 2)
    gradients.note_left()
    if changed:
        layer.weight.grad.mul_(2)
    assert gradients.changed_since() is changed
    sent, layer.weight.grad = weakref.ref(layer.weight.grad), None
    assert sent() is None
