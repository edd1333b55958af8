"""One vector of all trained weights, which two threads change."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.torch.tensors.flat_weights import FlatWeights
from slipstream.torch.tensors.inventory import Inventory, is_constant


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
    weights.begin()
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
    weights = weights_of(net)
    weights.begin()
    weights.add(0, np.ones(8, np.float32))
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


# ---- other layouts, and other memory


def test_weights_in_another_layout_are_the_same_vector() -> None:
    plain, turned = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    turned.load_state_dict(plain.state_dict())
    both = [weights_of(net) for net in (plain, turned)]
    for weights in both:
        weights.begin()
    turned.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert not turned.weight.is_contiguous()
    added = np.arange(90, dtype=np.float32)
    for weights, net in zip(both, (plain, turned), strict=True):
        weights.add(20, added[20:])
        net(torch.ones(1, 3, 5, 5)).square().sum().backward()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, foreach=False)
        weights.stepped(optimizer.step, 0.25)
        weights.add(0, added)
    torch.testing.assert_close(turned.weight.contiguous(), plain.weight.contiguous())
    np.testing.assert_allclose(both[1].whole(), both[0].whole(), rtol=1e-5)
    assert not turned.weight.is_contiguous()
    assert both[1].written.found == ""


def step(weights: FlatWeights, net: nn.Module) -> None:
    step_of(weights, net, inputs=3)


def step_of(weights: FlatWeights, net: nn.Module, inputs: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net(torch.ones(4, inputs)).sum().backward()
    weights.stepped(optimizer.step, 1.0)


def test_what_arrives_while_the_model_has_other_weights_is_kept() -> None:
    net = nn.Linear(3, 2)
    weights = weights_of(net)
    step(weights, net)
    before = weights.whole()
    own = [parameter.data for parameter in net.parameters()]
    with weights.keeping_apart():
        for parameter in net.parameters():
            parameter.data = torch.full_like(parameter, 7.0)
        weights.add(0, np.ones(8, np.float32))
        np.testing.assert_array_equal(weights.whole(), before + 1)  # for one that joins, too
        assert (net.weight == 7.0).all()
        for parameter, data in zip(net.parameters(), own, strict=True):
            parameter.data = data
    np.testing.assert_array_equal(weights.whole(), before + 1)
    step(weights, net)
    assert weights.written.found == ""


def test_what_arrives_before_the_first_step_is_added_to_weights_that_the_loop_loads() -> None:
    net = nn.Linear(3, 2)
    weights = weights_of(net)
    weights.add(2, np.ones(3, np.float32))
    weights.add(3, np.ones(2, np.float32))
    net.load_state_dict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
    weights.stepped(lambda: None, 1.0)
    np.testing.assert_array_equal(weights.whole(), [0, 0, 1, 2, 2, 0, 0, 0])
    weights.add(0, np.ones(8, np.float32))
    np.testing.assert_array_equal(weights.whole(), [1, 1, 2, 3, 3, 1, 1, 1])


@pytest.mark.parametrize("begin", [FlatWeights.begin, FlatWeights.whole])
def test_what_has_arrived_before_the_first_step_is_in_what_others_get(
    begin: Callable[[FlatWeights], object],
) -> None:
    """At a flush, and for a worker that is started again."""
    net = nn.Linear(3, 2)
    weights = weights_of(net)
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    weights.add(0, np.ones(8, np.float32))
    begin(weights)
    after = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert torch.equal(after, before + 1)


# ---- weights that the loop writes itself


def swap(net: nn.Module, arrive: Callable[[], None]) -> None:
    """As libraries do that average weights."""
    own = [parameter.detach().clone() for parameter in net.parameters()]
    for parameter in net.parameters():
        parameter.data.fill_(0.5)
    arrive()
    for parameter, values in zip(net.parameters(), own, strict=True):
        parameter.data.copy_(values)


def test_weights_that_are_swapped_while_updates_arrive_are_named() -> None:
    net = nn.Linear(3, 2)
    weights = weights_of(net)
    step(weights, net)
    swap(net, lambda: None)  # nothing is lost
    weights.add(0, np.ones(8, np.float32))
    step(weights, net)
    assert weights.written.found == ""
    swap(net, lambda: weights.add(0, np.ones(8, np.float32)))
    assert weights.written.found == "weight"


@pytest.mark.parametrize("stop", [9, 96], ids=["a piece", "all"])
@pytest.mark.parametrize("start", [0, 3, 80])
def test_updates_that_arrive_while_a_swap_begins_are_named(start: int, stop: int) -> None:
    """After the loop has read weights to put them back, and before it writes others."""
    net = nn.Linear(12, 8, bias=False)
    weights = weights_of(net)
    weights.stepped(lambda: None, 1.0)
    own = net.weight.detach().clone()
    values = np.ones(min(stop, 96 - start), np.float32)
    weights.add(start, values)
    weights.add(start + 1, values[:-1])  # pieces may begin elsewhere
    weights.look()
    assert weights.written.found == ""
    net.weight.data.copy_(own)
    weights.look()
    assert weights.written.found == "weight"


def test_what_peers_add_one_by_one_is_not_the_loops() -> None:
    net = nn.Linear(12, 8)
    weights = weights_of(net)
    for size in (5, 7, 104):
        step_of(weights, net, inputs=12)
        for start in range(0, 104, size):
            weights.add(start, np.ones(min(size, 104 - start), np.float32))
    weights.look()
    assert weights.written.found == ""


@pytest.mark.parametrize("replaced", [False, True], ids=["in place", "replaced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_weights_that_are_written_after_a_step_are_named(
    dtype: torch.dtype, replaced: bool
) -> None:
    net = nn.ParameterDict({"one": torch.ones((), dtype=dtype), "empty": torch.empty(0)})
    weights = FlatWeights(Inventory.of(net))
    net["one"].data.fill_(2.0)  # loaded before the first step
    weights.add(0, np.ones(1, np.float32))
    weights.stepped(lambda: net["one"].data.add_(1), 1.0)
    weights.add(0, np.ones(1, np.float32))
    assert net["one"].item() == 5.0
    weights.stepped(lambda: net["one"].data.add_(1), 1.0)
    assert weights.written.found == ""
    if replaced:
        net["one"].data = torch.full_like(net["one"], 0.1)
    else:
        net["one"].data.clamp_(max=0.1) if not dtype.is_complex else net["one"].data.fill_(0.1)
    weights.stepped(lambda: None, 1.0)
    assert weights.written.found == "one"


def test_weights_that_the_job_writes_are_not_the_loops() -> None:
    net = nn.Linear(3, 2)
    weights = weights_of(net)
    step(weights, net)
    with torch.no_grad():
        net.weight.zero_()  # as a flush gives a worker rank 0's
    weights.note()
    step(weights, net)
    assert weights.written.found == ""


def test_tables_that_change_in_forward_passes_are_not_compared() -> None:
    net = nn.Embedding(3, 2, max_norm=1.0)
    weights = FlatWeights(Inventory.of(net), is_constant(net))
    weights.stepped(lambda: None, 1.0)
    nn.init.constant_(net.weight, 9.0)
    net(torch.arange(3))
    weights.stepped(lambda: None, 1.0)
    assert weights.written.found == ""
