"""Updates of shared weights against torch's own optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slipstream._native import Update, add_rows
from slipstream.planning.segment import ABSENT, DENSE, ROWS, SegmentPlan, SharedTensor
from slipstream.runtime.shared_memory.optimizer import SharedOptimizer
from slipstream.torch.modes.shared_weights import Settings, settings_of

SHAPES = [(7, 3), (33,), (2, 2, 5)]
STEPS = 5


def shared(dtype: torch.dtype, *, in_rows: bool = False) -> list[SharedTensor]:
    name = str(dtype).removeprefix("torch.")
    return [
        SharedTensor(f"w{i}", shape, name, dtype.itemsize, 0, in_rows and i == 0)
        for i, shape in enumerate(SHAPES)
    ]


class Bench:
    """A slot and weights in plain memory, beside the same parameters in torch's hands."""

    def __init__(
        self, kind: str, dtype: torch.dtype, *, in_rows: bool = False, **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(s, dtype=dtype)) for s in SHAPES]
        self.torch = getattr(torch.optim, kind)(self.parameters, **settings)
        self.plan = SegmentPlan.of(shared(dtype, in_rows=in_rows), groups=1)
        self.weights = np.zeros(self.plan.weights_nbytes, np.uint8)
        self.slot = np.zeros(self.plan.slot_nbytes, np.uint8)
        self.native = SharedOptimizer(self.plan, kind, settings_of(self.torch))
        for view, parameter in zip(self.views(), self.parameters, strict=True):
            view.copy_(parameter.detach())

    def views(self) -> list[torch.Tensor]:
        return [
            self._tensor(self.weights, at, tensor)
            for at, tensor in zip(self.plan.weights_at, self.plan.tensors, strict=True)
        ]

    def gradients(self) -> list[torch.Tensor]:
        return [
            self._tensor(self.slot, gradient.at, self.plan.tensors[gradient.tensor])
            for gradient in self.plan.gradients
        ]

    @staticmethod
    def _tensor(raw: np.ndarray, at: int, tensor: SharedTensor) -> torch.Tensor:
        flat = torch.from_numpy(raw)[at : at + tensor.nbytes]
        return flat.view(getattr(torch, tensor.dtype)).view(tensor.shape)

    def forms(self) -> np.ndarray:
        return self.slot[: 8 * len(self.plan.gradients)].view(np.uint64)

    def numbers(self, index: int) -> np.ndarray:
        at = self.plan.gradients[index].numbers_at
        return self.slot[at : at + 8 * SHAPES[index][0]].view(np.int64)

    def step(self, forms: list[int]) -> None:
        self.forms()[:] = forms
        at = self.plan.settings_at
        self.slot[at : at + 64].view(np.float64)[:] = settings_of(self.torch)[0]
        self.native.apply(memoryview(self.weights), memoryview(self.slot))

    def assert_alike(self, dtype: torch.dtype) -> None:
        for view, parameter in zip(self.views(), self.parameters, strict=True):
            torch.testing.assert_close(
                view, parameter.detach(), rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6
            )


CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "maximize": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "alpha": 0.9}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
    ("Adagrad", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.2, "eps": 1e-4, "initial_accumulator_value": 0.5}),
    ("Adagrad", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_as_torch_does_it(kind: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    bench = Bench(kind, dtype, **settings)
    for step in range(STEPS):
        # One tensor has no gradient now and then: it neither moves nor forgets.
        absent = step == 2
        for index, (view, p) in enumerate(zip(bench.gradients(), bench.parameters, strict=True)):
            view.copy_(torch.randn(p.shape, dtype=dtype))
            p.grad = None if absent and index == 1 else view.clone()
        bench.torch.step()
        bench.step([DENSE, ABSENT if absent else DENSE, DENSE])
    bench.assert_alike(dtype)


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_a_gradient_in_rows_is_the_same_gradient(kind: str, settings: dict[str, Any]) -> None:
    bench = Bench(kind, torch.float32, in_rows=True, **settings)
    for step in range(STEPS):
        rows = [step % 7, (step + 3) % 7]
        views = bench.gradients()
        assert not views[0].any()  # whoever applies rows leaves zeros
        views[0][rows] = torch.randn(2, 3)
        bench.parameters[0].grad = views[0].clone()
        bench.numbers(0)[:3] = [*rows, rows[0]]  # named twice, it counts once
        bench.torch.step()
        bench.step([ROWS + 3, ABSENT, ABSENT])
    bench.assert_alike(torch.float32)


@pytest.mark.parametrize(("kind", "used"), [("Adagrad", [0, 1, 2]), ("Adam", [0])])
def test_state_of_what_was_never_used_is_as_in_torch(kind: str, used: list[int]) -> None:
    bench = Bench(kind, torch.float32, lr=0.1)
    bench.gradients()[0].fill_(1.0)
    bench.parameters[0].grad = bench.gradients()[0].clone()
    bench.torch.step()
    bench.step([DENSE, ABSENT, ABSENT])
    assert [n for n, p in enumerate(bench.parameters) if bench.torch.state.get(p)] == used
    assert len(bench.native.pieces()) == len(used)


def test_only_the_rows_that_are_named_are_touched() -> None:
    bench = Bench("SGD", torch.float32, in_rows=True, lr=1.0)
    before = bench.views()[0].clone()
    bench.gradients()[0].fill_(1.0)
    bench.numbers(0)[:1] = [4]
    bench.step([ROWS + 1, ABSENT, ABSENT])
    changed = (bench.views()[0] != before).any(1)
    assert changed.tolist() == [row == 4 for row in range(7)]


@pytest.mark.parametrize(
    ("forms", "numbers", "reason"),
    [
        ([ROWS + 8, DENSE, DENSE], [0], "more rows than it has"),
        ([ROWS + 1, DENSE, DENSE], [7], "a row that it does not have"),
        ([ROWS + 1, DENSE, DENSE], [-1], "a row that it does not have"),
        ([DENSE, ROWS + 1, DENSE], [0], "rows that has none"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    forms: list[int], numbers: list[int], reason: str
) -> None:
    bench = Bench("SGD", torch.float32, in_rows=True, lr=1.0)
    before = bench.weights.copy()
    for view in bench.gradients():
        view.fill_(1.0)
    bench.numbers(0)[: len(numbers)] = numbers
    with pytest.raises(ValueError, match=reason):
        bench.step(forms)
    assert np.array_equal(bench.weights, before)


def test_memory_that_is_too_small_is_refused() -> None:
    plan = SegmentPlan.of(shared(torch.float32), groups=1)
    update = Update("sgd", plan.places(), 1)
    enough, steps = np.zeros(plan.weights_nbytes, np.uint8), np.zeros(3, np.uint64)
    slot = np.zeros(plan.slot_nbytes, np.uint8)
    for name, arguments in {
        "weights": (enough[:8], slot, [enough] * 3, steps),
        "slot": (enough, slot[:8], [enough] * 3, steps),
        "second": (enough, slot, [enough, enough[:8], enough], steps),
        "steps": (enough, slot, [enough] * 3, steps[:1]),
    }.items():
        with pytest.raises(ValueError, match=f"{name} has"):
            update.apply(*arguments)
    with pytest.raises(ValueError, match="sgd, adam, rmsprop or adagrad"):
        Update("lion", plan.places(), 1)
    with pytest.raises(ValueError, match="no group 0"):
        Update("sgd", plan.places(), 0)


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_what_an_optimizer_remembers_goes_on_elsewhere(kind: str, settings: dict[str, Any]) -> None:
    bench, other = (Bench(kind, torch.float32, **settings) for _ in range(2))
    for step in range(STEPS):
        for each in (bench, other)[: 1 if step < 3 else 2]:
            torch.manual_seed(step)
            for view in each.gradients():
                view.copy_(torch.randn(view.shape))
            each.step([DENSE] * 3)
        if step == 2:
            other.weights[:] = bench.weights
            other.native.load(bench.native.pieces())
    assert np.array_equal(bench.weights, other.weights)


# ---- rows on their way into a slot


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_added_and_named(dtype: type) -> None:
    out, numbers = np.zeros((6, 3), dtype), np.full(6, -1)
    ids, values = np.array([[4, 1, 4]]), np.arange(9, dtype=dtype).reshape(3, 3)
    add_rows(out, numbers, ids, values, 3, dtype is np.float64)
    expected = np.zeros((6, 3), dtype)
    np.add.at(expected, ids[0], values)
    assert np.array_equal(out, expected)
    assert numbers.tolist() == [4, 1, 4, -1, -1, -1]


@pytest.mark.parametrize(
    ("ids", "rows", "room", "width", "message"),
    [
        ([0, 6], 2, 6, 3, "out has no such row"),
        ([-1], 1, 6, 3, "out has no such row"),
        ([0, 1], 1, 6, 3, "values does not have a row for each of ids"),
        ([0, 1, 2], 3, 2, 3, "numbers has no room"),
        ([0], 1, 6, 0, "whole rows"),
        ([0], 1, 6, 5, "whole rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    ids: list[int], rows: int, room: int, width: int, message: str
) -> None:
    out, numbers = np.zeros((6, 3), np.float32), np.full(room, -1)
    values = np.ones((rows, 3), np.float32)
    with pytest.raises(ValueError, match=message):
        add_rows(out, numbers, np.array(ids), values, width, False)
    assert not out.any()
    assert (numbers == -1).all()


def test_settings_follow_the_optimizer() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    rate = torch.tensor(0.5)
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    settings = Settings(optimizer)
    assert settings() == [*settings_of(optimizer)[0], *settings_of(optimizer)[1]]
    assert settings()[0] == 0.1
    optimizer.param_groups[1]["lr"] = 0.2
    assert settings()[8] == 0.2
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    assert settings()[1:3] == [0.5, 0.6]
    optimizer.param_groups[0]["lr"] = rate
    assert settings()[0] == 0.5
    rate.fill_(0.25)
    assert settings()[0] == 0.25
    optimizer.param_groups[0] |= {"lr": 0.1, "betas": [0.5, 0.6]}
    assert settings()[1:3] == [0.5, 0.6]
    optimizer.param_groups[0]["betas"][0] = 0.7
    assert settings()[1:3] == [0.7, 0.6]
    optimizer.param_groups[0]["initial_lr"] = 0.1  # nobody reads it
    del optimizer.param_groups[1]["maximize"]
    assert settings()[0] == 0.1
