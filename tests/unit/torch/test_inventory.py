import pytest
import torch
from torch import nn

from slipstream.errors import ForeignParameters
from slipstream.torch.tensors.inventory import (
    Inventory,
    check_optimizer,
    config_fingerprint,
    spec_of,
    whole_state,
)
from slipstream.types import Spec


class Tied(nn.Module):
    """An embedding whose weight is also the decoder's, and a frozen scale between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.decode = nn.Linear(3, 5)
        self.decode.weight = self.embed.weight


TIED = "its weight is tied to another layer's"


def test_everything_trainable_is_listed_once_in_forward_order() -> None:
    model = Tied()
    inventory = Inventory.of(model)
    assert inventory.specs == (
        Spec("embed.weight", (5, 3), "float32", 0, obstacle=TIED),
        Spec("norm.weight", (3,), "float32", 1),
        Spec("norm.bias", (3,), "float32", 2),
        Spec("decode.bias", (5,), "float32", 3, obstacle=TIED),
        Spec("norm.running_mean", (3,), "float32", 4, "buffer"),
        Spec("norm.running_var", (3,), "float32", 5, "buffer"),
    )
    assert inventory.tensors[0] is model.embed.weight
    assert inventory.tensors[4] is model.norm.running_mean
    assert all(
        tuple(tensor.shape) == spec.shape
        for spec, tensor in zip(inventory.specs, inventory.tensors, strict=True)
    )


def test_the_whole_state_has_what_is_frozen_and_what_only_counts() -> None:
    names = [name for name, _ in whole_state(Tied())]
    assert "scale" in names
    assert "norm.num_batches_tracked" in names
    assert "decode.weight" not in names, "tied: known by its first name"
    assert len(names) == len(set(names)) == 8
    assert not any(tensor.requires_grad for _, tensor in whole_state(Tied()))


def test_a_buffer_registered_twice_is_listed_once() -> None:
    model = nn.Module()
    model.register_buffer("one", torch.zeros(2))
    model.register_buffer("same", model.one)
    assert [spec.name for spec in Inventory.of(model).specs] == ["one"]


def test_peculiar_parameters_keep_their_shape() -> None:
    model = nn.Module()
    model.scalar = nn.Parameter(torch.tensor(1.0))
    model.none = nn.Parameter(torch.empty(0, 4))
    model.congested = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    model.turned = nn.Parameter(torch.zeros(2, 3).t())
    model.wave = nn.Parameter(torch.zeros(2, 3, dtype=torch.complex128))
    assert [(s.shape, s.dtype) for s in Inventory.of(model).specs] == [
        ((), "float32"),
        ((0, 4), "float32"),
        ((2,), "bfloat16"),
        ((3, 2), "float32"),
        ((2, 3, 2), "float64"),
    ]


def test_only_what_is_kept_stays_and_keeps_its_place_in_the_forward_pass() -> None:
    inventory = Inventory.of(Tied())
    kept = inventory.only({1, 3})
    assert [spec.name for spec in kept.specs] == ["norm.weight", "decode.bias"]
    assert [spec.order for spec in kept.specs] == [1, 3]
    assert kept.tensors == (inventory.tensors[1], inventory.tensors[3])


def test_integer_parameters_and_buffers_are_not_exchanged() -> None:
    model = nn.Module()
    model.ids = nn.Parameter(torch.arange(3), requires_grad=False)
    model.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    assert Inventory.of(model).specs == ()


def test_an_optimizer_of_the_models_own_parameters_is_fine() -> None:
    model = Tied()
    check_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    check_optimizer(model, torch.optim.SGD([model.decode.bias], lr=0.1))


def test_a_foreign_parameter_is_named_by_its_place() -> None:
    model, stranger = Tied(), nn.Linear(7, 2)
    groups = [{"params": model.parameters()}, {"params": stranger.parameters()}]
    with pytest.raises(
        ForeignParameters,
        match=r"group 1, parameter 0 of shape \(2, 7\) and 1 more.*model\.parameters\(\)",
    ):
        check_optimizer(model, torch.optim.SGD(groups, lr=0.1))


def test_portraits_show_what_must_be_equal_on_all_ranks() -> None:
    def drawn(model: nn.Module, lr: float = 0.1) -> list[str]:
        return config_fingerprint(model, torch.optim.SGD(model.parameters(), lr=lr))

    assert drawn(Tied()) == drawn(Tied())
    assert drawn(Tied()) != drawn(Tied(), lr=0.5)
    assert "parameter 'scale': (3,) float32 frozen" in drawn(Tied())
    changes = [
        lambda m: m.scale.requires_grad_(True),
        lambda m: m.decode.double(),
        lambda m: m.register_buffer("more", torch.zeros(1)),
        lambda m: setattr(m, "decode", nn.Linear(3, 5)),
    ]
    for change in changes:
        model = Tied()
        change(model)
        assert drawn(model) != drawn(Tied())


def test_spec_roles() -> None:
    assert spec_of("b", torch.zeros(1), 4, "buffer").role == "buffer"
    assert spec_of("p", torch.zeros(1), 4, "parameter").role == "parameter"
