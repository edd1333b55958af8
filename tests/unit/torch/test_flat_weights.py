"""One vector of all trained weights, which two threads change."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.torch.flat_weights import FlatWeights
from slipstream.torch.inventory import Inventory


def mixed() -> nn.Module:
    net = nn.Module()
    net.register_parameter("a", nn.Parameter(torch.zeros(3, 4)))
    net.register_parameter("frozen", nn.Parameter(torch.ones(5), requires_grad=False))
    net.register_parameter("short", nn.Parameter(torch.zeros(6, dtype=torch.bfloat16)))
    net.register_parameter("turn", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    net.register_buffer("mean", torch.ones(7))
    net.register_parameter("one", nn.Parameter(torch.zeros(())))
    return net


def weights_of(net: nn.Module) -> FlatWeights:
    return FlatWeights(Inventory.of(net))


def test_slices_end_up_where_they_belong() -> None:
    net = mixed()
    weights = weights_of(net)
    assert weights.numel == 12 + 6 + 4 + 1
    weights.add(10, np.arange(1, 12, dtype=np.float32))
    assert net.a.flatten().tolist() == [0.0] * 10 + [1.0, 2.0]
    assert net.short.tolist() == [3, 4, 5, 6, 7, 8]
    assert net.turn.tolist() == [9 + 10j, 11 + 0j]
    weights.add(22, np.array([5], np.float32))
    assert net.one.item() == 5
    assert net.frozen.tolist() == [1.0] * 5
    assert net.mean.tolist() == [1.0] * 7


def test_every_slice_of_a_partition_and_none_of_them() -> None:
    net = mixed()
    weights = weights_of(net)
    for start in range(0, 23, 5):
        weights.add(start, np.ones(min(5, 23 - start), np.float32))
    weights.add(23, np.empty(0, np.float32))
    np.testing.assert_array_equal(weights.whole(), np.ones(23))
    weights.clear()
    assert not weights.whole().any()


def test_a_step_counts_for_a_part_and_is_told() -> None:
    net = nn.Linear(3, 2)
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net(torch.ones(4, 3)).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in net.parameters()])  # type: ignore[union-attr]
    update = weights_of(net).stepped(optimizer.step, 0.25)
    torch.testing.assert_close(torch.from_numpy(update), -0.125 * gradient)
    after = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert torch.equal(after, before + torch.from_numpy(update))


def test_autograd_does_not_mind_what_arrives_between_its_passes() -> None:
    """A pass under way may read weights of different age; that is no error of the user's."""
    net = nn.Linear(3, 2)
    loss = net(torch.ones(4, 3, requires_grad=True)).sum()
    weights_of(net).add(0, np.ones(8, np.float32))
    loss.backward()


def test_nothing_is_lost_between_threads() -> None:
    net = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(net.weight)
    weights, rounds = weights_of(net), 400

    def own_step() -> None:
        with torch.no_grad():
            net.weight.add_(1)

    def receive() -> None:
        for _ in range(rounds):
            weights.add(0, np.ones(weights.numel, np.float32))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=receive)
    thread.start()
    for _ in range(rounds):
        weights.stepped(own_step, 1.0)
    thread.join()
    sys.setswitchinterval(interval)
    assert net.weight.unique().tolist() == [2.0 * rounds]


def test_weights_that_are_not_laid_out_row_by_row_are_refused() -> None:
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(ConfigError, match=r"'weight'.*contiguous_format"):
        weights_of(net)
