"""Weights are awaited before they are read, and no earlier than that."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from slipstream.torch.capture.forward_gate import ForwardGate


class Gate:
    """A model behind a gate that writes down what was awaited."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.waits: list[list[str]] = []
        self.begun = 0
        self.order = list(self.names)
        places = {key: i for i, key in enumerate(self.order)}
        self.plain = copy.deepcopy(model)
        self.gate = ForwardGate(
            model, places, self._wait, self._begin, read=lambda: self._wait(None)
        )

    def _begin(self) -> None:
        self.begun += 1

    def _wait(self, tensors: Sequence[int] | None) -> None:
        chosen = range(len(self.order)) if tensors is None else tensors
        awaited = sorted(self.names[self.order[i]] for i in chosen)
        if awaited:
            self.waits.append(awaited)

    def run(self, *inputs: torch.Tensor) -> list[list[str]]:
        self.waits = []
        self.model(*inputs)
        return self.waits


def test_layers_are_awaited_one_by_one_from_the_second_pass_on() -> None:
    gate = Gate(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    everything = ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert gate.run(torch.ones(1, 2))[0] == everything, "nothing is known of the first pass"
    assert gate.run(torch.ones(1, 2)) == [["0.bias", "0.weight"], ["2.bias", "2.weight"]]


def test_weights_read_without_a_call_are_awaited_at_the_entrance() -> None:
    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(2, 2, bias=False)
            self.read = nn.Linear(2, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.used(x), self.read.weight)

    gate = Gate(Peeks())
    gate.run(torch.ones(1, 2))
    assert gate.run(torch.ones(1, 2)) == [["read.weight"], ["used.weight"]]


def test_attention_waits_for_the_projection_it_never_calls() -> None:
    gate = Gate(nn.MultiheadAttention(4, 2, batch_first=True))
    x = torch.ones(1, 3, 4)
    gate.run(x, x, x)
    assert {"out_proj.weight", "out_proj.bias"} <= set(gate.run(x, x, x)[0])


def test_a_tied_weight_is_awaited_by_whoever_is_called_first() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    gate = Gate(model)
    gate.run(torch.ones(1, 2))
    assert gate.run(torch.ones(1, 2))[0] == ["0.weight"]


def test_a_forward_that_fails_leaves_the_gate_in_order() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)
            self.read = nn.Linear(2, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() == 0:
                raise ArithmeticError("in the middle")
            return nn.functional.linear(self.inner(x), self.read.weight)

    gate = Gate(Fails())
    with pytest.raises(ArithmeticError):
        gate.run(torch.zeros(1, 2))
    gate.run(torch.ones(1, 2))
    assert gate.run(torch.ones(1, 2)) == [["read.weight"], ["inner.weight"]]


def test_reading_the_state_waits_for_all_of_it() -> None:
    gate = Gate(nn.Linear(2, 2))
    gate.model.state_dict()
    assert gate.waits == [["bias", "weight"]]


def test_a_submodule_may_be_called_on_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    gate = Gate(model)
    gate.run(torch.ones(1, 2))
    gate.waits = []
    model[1](torch.ones(1, 2))
    assert ["1.weight"] in gate.waits


def test_only_the_outermost_forward_begins_one() -> None:
    gate = Gate(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))))
    gate.run(torch.ones(1, 2))
    gate.run(torch.ones(1, 2))
    assert gate.begun == 2


def average_of(gate: Gate) -> None:
    AveragedModel(gate.plain).update_parameters(gate.model)


@pytest.mark.parametrize(
    "read",
    [
        lambda gate: list(gate.model.parameters()),
        lambda gate: dict(gate.model.named_parameters()),
        lambda gate: list(gate.model[1].buffers()),
        lambda gate: gate.model.get_parameter("0.weight"),
        average_of,
    ],
)
def test_forward_gate_asking_for_parameters_waits_for_all_of_them(read: Any) -> None:
    gate = Gate(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    read(gate)
    assert gate.waits
    assert all(len(waited) == len(gate.order) for waited in gate.waits)


def test_forward_gate_zero_grad_waits_for_nothing() -> None:
    gate = Gate(nn.Linear(2, 2))
    gate.model.weight.grad = torch.ones(2, 2)
    gate.model.zero_grad()
    assert gate.model.weight.grad is None
    assert gate.waits == []


class AsksForDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(next(self.parameters()).device)
        return self.last(self.first(x))


def test_forward_gate_forward_asking_for_the_device_does_not_wait_for_later_layers() -> None:
    gate = Gate(AsksForDevice())
    gate.run(torch.ones(1, 2))
    waits = gate.run(torch.ones(1, 2))
    assert waits[0] == ["first.weight"]
    assert waits[-1] == ["last.weight"]


def test_forward_gate_forward_asking_for_all_waits_for_each() -> None:
    class Penalized(AsksForDevice):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            last = self.get_parameter("last.weight").sum()
            penalty = sum(p.square().sum() for _, p in self.named_parameters())
            return super().forward(x) + last + penalty

    gate = Gate(Penalized())
    gate.run(torch.ones(1, 2))
    assert gate.run(torch.ones(1, 2))[:3] == [["last.weight"], ["first.weight"], ["last.weight"]]


def test_forward_gate_model_can_be_compiled() -> None:
    gate = Gate(AsksForDevice())
    compiled = torch.compile(gate.model, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(torch.ones(1, 2))
    assert "trace" not in "".join(str(warning.message) for warning in caught)
    gate.waits = []
    compiled(torch.ones(1, 2))
    assert gate.waits == [["first.weight"], ["last.weight"]]


def test_forward_gate_of_several_pairs_all_wait_for_one_reader() -> None:
    model, waited = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), list[str]()

    def gate_of(layer: nn.Module, name: str) -> ForwardGate:
        places = {id(p): i for i, p in enumerate(layer.parameters())}
        return ForwardGate(
            model, places, lambda _: None, lambda: None, read=lambda: waited.append(name)
        )

    def read() -> set[str]:
        waited.clear()
        list(model.parameters())
        return set(waited)

    first, second = gate_of(model[0], "first"), gate_of(model[1], "second")
    assert read() == {"first", "second"}
    waited.clear()
    model.zero_grad()
    assert waited == []
    first.remove()
    assert read() == {"second"}
    second.remove()
    assert read() == set()
    assert "parameters" not in vars(model)


def test_forward_gate_removed_leaves_a_plain_module() -> None:
    plain = sorted(vars(nn.Linear(2, 2)))
    gate = Gate(nn.Linear(2, 2))
    gate.gate.remove()
    assert sorted(vars(gate.model)) == plain
    list(gate.model.parameters())
    assert gate.waits == []
