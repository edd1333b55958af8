from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.apps.bench.devices import EmulatedLinear, EmulatedNet
from slipstream.apps.bench.noise import BLOCK_NUMEL, Noise
from slipstream.apps.bench.tables import Layer, Table, table
from slipstream.apps.bench.timeline import Timeline
from slipstream.errors import ConfigError
from slipstream.torch.tensors.inventory import Inventory

ROWS = 4
NET = Table(
    "small",
    (
        Layer("conv.1", "conv", ((8, 3, 3, 3), (8,)), forward_ms=10, backward_ms=20),
        Layer("pool", "other", (), forward_ms=1, backward_ms=2),
        Layer("conv2", "conv", ((8, 8, 3, 3), (8,), (8,)), forward_ms=30, backward_ms=60),
        Layer("fc1", "fc", ((16, 32), (16,)), forward_ms=2, backward_ms=4),
        Layer("fc2", "fc", ((5, 16),), forward_ms=3, backward_ms=6),
    ),
    batch=ROWS,
    origin="made up",
)


class Clock:
    """A sleep ends when it should; nothing else takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def emulate(clock: Clock, net: Table = NET, *, seed: int = 0) -> EmulatedNet:
    timeline = Timeline(clock=clock, sleep=clock.sleep, spin_s=0)
    return EmulatedNet(net, timeline=timeline, seed=seed)


def backward(net: EmulatedNet, rows: int = ROWS) -> None:
    output = net(torch.zeros(rows, 1))
    F.cross_entropy(output, torch.zeros(rows, dtype=torch.long)).backward()


def test_it_holds_the_tables_tensors_in_its_order(clock: Clock) -> None:
    assert Inventory.of(emulate(clock)).specs == NET.specs
    scaled = table("googlenet").scaled(1 / 64)
    assert Inventory.of(emulate(clock, scaled)).specs == scaled.specs


def test_a_step_takes_the_tables_time_and_a_row_its_share(clock: Clock) -> None:
    net = emulate(clock)
    with torch.no_grad():
        net(torch.zeros(ROWS, 1))
    assert clock.now == pytest.approx(NET.forward_ms / 1000)
    for rows in (ROWS, 1, 2 * ROWS):
        begun = clock.now
        backward(net, rows)
        assert clock.now - begun == pytest.approx(NET.step_ms / 1000 * rows / ROWS)
    assert net.timeline.busy_s == pytest.approx(clock.now)


def test_gradients_come_layer_by_layer_as_backward_reaches_them(clock: Clock) -> None:
    net = emulate(clock)
    seen: list[tuple[str, float]] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: seen.append((name, round(1000 * (clock.now - begun))))
        )
    begun = clock.now
    backward(net)
    by_layer = [(name.rpartition(".")[0], at) for name, at in seen]
    expected = [("fc2", 52), *[("fc1", 56)] * 2, *[("conv2", 116)] * 3, *[("conv/1", 138)] * 2]
    assert by_layer == expected


def test_gradients_have_shapes_and_contents_and_keep_their_memory(clock: Clock) -> None:
    net = emulate(clock)
    addresses = []
    for _ in range(3):
        net.zero_grad(set_to_none=True)
        backward(net)
        for parameter in net.parameters():
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad.abs().sum() > 0
        addresses.append([p.grad.data_ptr() for p in net.parameters() if p.grad is not None])
    assert addresses[0] == addresses[1] == addresses[2]


def test_accumulated_gradients_do_not_grow_without_bound(clock: Clock) -> None:
    net = emulate(clock)
    for _ in range(50):
        backward(net)
    assert all(p.grad is not None and p.grad.abs().max() < 1 for p in net.parameters())


def test_workers_differ_by_seed_and_begin_alike(clock: Clock) -> None:
    first, second = emulate(clock, seed=1), emulate(clock, seed=2)
    for net in (first, second):
        backward(net)
    for mine, yours in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, yours)
        assert mine.grad is not None
        assert yours.grad is not None
        assert not torch.equal(mine.grad, yours.grad)


def linears(net: EmulatedNet) -> list[EmulatedLinear]:
    return [layer for layer in net.modules() if isinstance(layer, EmulatedLinear)]


@pytest.mark.parametrize("rows", [ROWS, 3])
def test_hooks_on_a_matrix_see_both_factors(clock: Clock, rows: int) -> None:
    net = emulate(clock)
    seen: dict[str, tuple[int, ...]] = {}

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        name = f"{module.in_features}"
        seen[f"x{name}"] = tuple(inputs[0].shape)
        output.register_hook(lambda dy: seen.update({f"dy{name}": tuple(dy.shape)}))

    for linear in linears(net):
        assert isinstance(linear, nn.Linear)
        linear.register_forward_hook(watch)
    backward(net, rows)
    assert seen == {"x32": (rows, 32), "dy32": (rows, 16), "x16": (rows, 16), "dy16": (rows, 5)}


def test_factors_can_be_had_instead_of_gradients(clock: Clock) -> None:
    net = emulate(clock)
    _, last = linears(net)
    given: list[tuple[Tensor, Tensor]] = []
    last.on_factors = lambda x, dy: given.append((x, dy)) is None
    output = net(torch.zeros(ROWS, 1))
    target = torch.arange(ROWS)
    F.cross_entropy(output, target).backward()
    ((x, dy),) = given
    assert x.shape == (ROWS, 16)
    expected = (output.detach().softmax(1) - F.one_hot(target, 5)) / ROWS
    torch.testing.assert_close(dy, expected)
    assert last.weight.grad is None
    assert linears(net)[0].weight.grad is not None


def test_a_frozen_parameter_gets_no_gradient(clock: Clock) -> None:
    net = emulate(clock)
    frozen = linears(net)[0].weight.requires_grad_(False)
    backward(net)
    assert frozen.grad is None


def test_the_update_counts_as_part_of_the_step(clock: Clock) -> None:
    net = emulate(clock)

    class SlowUpdate(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            clock.now += 0.05
            super().step(closure)

    optimizer = SlowUpdate(net.parameters(), lr=0.01)
    net.include_update(optimizer)
    backward(net)
    begun = clock.now
    for _ in range(4):
        optimizer.step()
        backward(net)
    assert clock.now - begun == pytest.approx(4 * NET.step_ms / 1000)


def test_no_rows_no_step(clock: Clock) -> None:
    with pytest.raises(ConfigError, match="at least one row"):
        emulate(clock)(torch.zeros(0, 1))


def test_noise_fills_every_element() -> None:
    for numel in (1, BLOCK_NUMEL - 1, BLOCK_NUMEL, 2 * BLOCK_NUMEL + 3):
        made = Noise(0, 0.5).make((numel,))
        assert made.shape == (numel,)
        assert (made == 0).sum() == 0
    assert made.std() == pytest.approx(0.5, rel=0.02)
