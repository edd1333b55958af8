"""Compact gradients of single layers against torch's own; small integers, so that sums are exact.

A layer captures in a process of its own here: what it gives is sent to and rebuilt by nobody else.
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from slipstream.codecs import Factors, Rows
from slipstream.codecs.matrices import Matrix, Scratch, to_frames
from slipstream.plan import layers_of
from slipstream.runtime.exchange.aggregator import LayerGradients
from slipstream.systems import adam_factors
from slipstream.torch.tensors.compact_layers import (
    CompactLayer,
    Ports,
    capture,
    form_of,
    is_transposed,
    named_forms,
    shape_of,
)
from slipstream.torch.tensors.inventory import Inventory, dtype_name
from slipstream.torch.tensors.layer_math import TorchLayerMath
from slipstream.types import Buffer, Cluster, Layer, Values


class Conv1D(nn.Module):
    """As transformers has it: fully connected, with a weight of inputs × outputs."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.ones(inputs, outputs, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(shape)


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of transformers are known by its module; the tests of frameworks use the real one."""
    module = ModuleType("transformers.pytorch_utils")
    vars(module)["Conv1D"] = Conv1D
    monkeypatch.setitem(sys.modules, module.__name__, module)


class Captured:
    """A layer whose gradients are captured, beside its plain copy."""

    def __init__(self, module: Any, *, takes: bool = True) -> None:
        self.module, self.plain = module, copy.deepcopy(module)
        form = form_of(module)
        assert form is not None
        bias = None if getattr(module, "bias", None) is None else 1
        self.layer = CompactLayer(shape_of("layer", module, form), module, 0, bias)
        self.takes, self.may_take = takes, True
        self.events: list[str] = []
        self.entered: list[Tensor] = []
        ports = Ports(self._may_take, self._entered, self._takes, self._captured, self._settled)
        self.end = capture([self.layer], ports)
        self.parameters = list(module.parameters())
        shape = self.layer.shape
        dtype = dtype_name(module.weight)
        matrix = (shape.outputs, shape.inputs, 0, bias, dtype, is_transposed(module))
        self.as_planned = Layer("layer", form, *matrix)
        self.math = TorchLayerMath(self.parameters, {"layer": module})
        self.scratch = Scratch()

    def _may_take(self, _: CompactLayer) -> bool:
        return self.may_take

    def _entered(self, _: CompactLayer, x: Tensor) -> int | None:
        self.entered.append(x)
        return None

    def _takes(self, _: CompactLayer) -> bool:
        return self.takes

    def _captured(self, _: CompactLayer) -> None:
        self.events.append("captured")

    def _settled(self, layer: CompactLayer) -> None:
        if layer.finish():
            self.events.append("settled")
            layer.detach()

    def codec(self, wire: Any = "same") -> Factors | Rows:
        return Factors(wire) if self.layer.shape.form == "factors" else Rows(wire)

    def exchange(self, wire: Any = "same") -> None:
        """What a round between one worker and itself would do."""
        frames = self.message(wire)
        self.layer.reset()
        self.rebuild([frames] if frames else [], divisor=1)

    def rebuild(self, given: Sequence[Sequence[Buffer]], divisor: int) -> None:
        if given:
            codec = self.codec()
            codec.combine(given, self.as_planned, self.math, self.scratch, divisor=divisor)

    def message(self, wire: Any = "same") -> list[Buffer]:
        """The frames of what has been captured; none if the layer was not used."""
        taken, codec = self.layer.take(), self.codec(wire)
        if taken is None:
            return []
        frames: list[Buffer] = []
        for place, matrix in enumerate((taken.first, taken.second)):
            dtype = codec.wire_dtype(dtype_name(matrix), place)
            raw = matrix.to(getattr(torch, dtype)).contiguous().view(-1).view(torch.uint8)
            frames += to_frames(Matrix(len(matrix), raw.numpy(), dtype))
        codec.examine(frames, self.as_planned)
        return frames

    def assert_equal(self) -> None:
        wanted, got = self.plain.named_parameters(), self.module.named_parameters()
        for (name, one), (_, other) in zip(wanted, got, strict=True):
            if one.grad is None:
                assert other.grad is None, name
                continue
            dense = one.grad.to_dense() if one.grad.is_sparse else one.grad
            assert other.grad is not None, name
            assert torch.equal(other.grad, dense), name


@pytest.fixture
def captured() -> Iterator[Callable[..., Captured]]:
    made: list[Captured] = []

    def make(module: nn.Module, **options: Any) -> Captured:
        made.append(Captured(module, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


def whole(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def integral(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(whole(*parameter.shape, seed=number))
    return module


def backward(module: Any, x: Tensor, seed: int = 5) -> None:
    out = module(x)
    (out * whole(*out.shape, dtype=out.dtype, seed=seed)).sum().backward()


def both(captured: Captured, run: Callable[[Any], None]) -> None:
    """The same on the layer and on its plain copy."""
    run(captured.module)
    run(captured.plain)


LINEARS = [
    ("1d", nn.Linear(5, 3), whole(5)),
    ("2d", nn.Linear(5, 3), whole(4, 5)),
    ("3d", nn.Linear(5, 3), whole(2, 4, 5)),
    ("4d", nn.Linear(5, 3, bias=False), whole(2, 3, 2, 5)),
    ("no rows", nn.Linear(5, 3), whole(0, 5)),
    ("no rows 3d", nn.Linear(5, 3), whole(2, 0, 5)),
    ("fp64", nn.Linear(5, 3, dtype=torch.float64), whole(4, 5, dtype=torch.float64)),
    ("bf16", nn.Linear(5, 3, dtype=torch.bfloat16), whole(4, 5, dtype=torch.bfloat16)),
    ("strided", nn.Linear(5, 3), whole(5, 4).t()),
    ("2d", Conv1D(3, 5), whole(4, 5)),
    ("3d", Conv1D(3, 5), whole(2, 4, 5)),
    ("square", Conv1D(5, 5), whole(4, 5)),
    ("fp64", Conv1D(3, 5, torch.float64), whole(4, 5, dtype=torch.float64)),
    ("bf16", Conv1D(3, 5, torch.bfloat16), whole(4, 5, dtype=torch.bfloat16)),
]
TABLES = [
    ("ids", nn.Embedding(9, 4), torch.tensor([1, 8, 0])),
    ("repeated", nn.Embedding(9, 4), torch.tensor([[1, 1, 3], [3, 1, 3]])),
    ("padding", nn.Embedding(9, 4, padding_idx=1), torch.tensor([[1, 1, 3], [3, 1, 0]])),
    ("last as padding", nn.Embedding(9, 4, padding_idx=-1), torch.tensor([8, 8, 2])),
    ("padding alone", nn.Embedding(9, 4, padding_idx=1), torch.tensor([1, 1])),
    ("sparse", nn.Embedding(9, 4, sparse=True), torch.tensor([5, 5, 2])),
    ("int32", nn.Embedding(9, 4), torch.tensor([5, 5, 2], dtype=torch.int32)),
    ("one id", nn.Embedding(9, 4), torch.tensor(5)),
    ("no ids", nn.Embedding(9, 4), torch.empty(2, 0, dtype=torch.long)),
    ("fp64", nn.Embedding(9, 4, dtype=torch.float64), torch.tensor([1, 1, 4])),
    ("bf16", nn.Embedding(9, 4, dtype=torch.bfloat16), torch.tensor([1, 1, 4])),
]
ALL = [(f"{type(module).__name__} {name}", module, x) for name, module, x in LINEARS + TABLES]


@pytest.mark.parametrize("takes", [True, False], ids=["compact", "dense"])
@pytest.mark.parametrize(("module", "x"), [row[1:] for row in ALL], ids=[row[0] for row in ALL])
def test_gradient_is_torchs_own(
    module: nn.Module, x: Tensor, takes: bool, captured: Callable[..., Captured]
) -> None:
    layer = captured(integral(copy.deepcopy(module)), takes=takes)
    for step in range(3):  # memory is reused
        layer.module.zero_grad()
        layer.plain.zero_grad()
        both(layer, lambda one, step=step: backward(one, x, seed=step))
        assert (layer.module.weight.grad is None) == takes
        layer.exchange()
        layer.assert_equal()
        with torch.no_grad():
            layer.module.weight.grad.data.add_(7)  # old optimizers write to it: no trace is left


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_add_up(set_to_none: bool, captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 3)))
    for step in range(4):
        both(layer, lambda one, step=step: backward(one, whole(4, 5), seed=step))
        layer.exchange()
        layer.assert_equal()
        if step == 1:
            layer.module.zero_grad(set_to_none=set_to_none)
            layer.plain.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("module", [nn.Linear(5, 3), nn.Embedding(9, 5)])
def test_a_gradient_that_somebody_keeps_is_not_overwritten(
    module: nn.Module, captured: Callable[..., Captured]
) -> None:
    layer = captured(integral(copy.deepcopy(module)))
    x = torch.tensor([3, 3, 1]) if isinstance(module, nn.Embedding) else whole(4, 5)
    kept: list[Tensor] = []
    for step in range(3):
        layer.module.zero_grad()
        backward(layer.module, x, seed=step)
        layer.exchange()
        kept.append(layer.module.weight.grad if step else layer.module.weight.grad.view(-1))
    assert len({one.data_ptr() for one in kept}) == 3
    place = layer.module.weight.grad.data_ptr()
    kept.clear()
    layer.module.zero_grad()
    backward(layer.module, x)
    layer.exchange()
    assert layer.module.weight.grad.data_ptr() == place


def test_several_uses_settle_once_and_add_up(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 5)))
    both(layer, lambda one: backward(lambda x: one(one(x)) + one(x[:2]).sum(), whole(4, 5)))
    assert layer.events == ["captured"] * 3 + ["settled"] * layer.events.count("settled")
    assert layer.layer.rows == 10
    layer.exchange()
    layer.assert_equal()


def test_two_graphs_whose_backward_comes_later(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 5)))

    def run(one: Any, exchange: Callable[[], None]) -> None:
        sums = [(one(one(whole(3, 5, seed=s))) * whole(3, 5)).sum() for s in (1, 2)]
        for each in sums:
            each.backward()
            exchange()

    run(layer.module, layer.exchange)
    run(layer.plain, lambda: None)
    layer.assert_equal()


def test_the_same_graph_twice(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 3)))

    def run(one: Any) -> None:
        out = (one(whole(4, 5)) * whole(4, 3)).sum()
        out.backward(retain_graph=True)
        out.backward()

    both(layer, run)
    layer.exchange()
    layer.assert_equal()


def test_a_layer_that_was_not_used(captured: Callable[..., Captured]) -> None:
    layer = captured(nn.Linear(5, 3))
    layer.module(whole(4, 5))
    layer.exchange()
    layer.assert_equal()


def test_memory_of_inputs_may_be_reused_between_passes(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 3)))

    def run(one: Any) -> None:
        memory = torch.empty(4, 5)
        for seed in range(3):
            backward(one, memory.copy_(whole(4, 5, seed=seed)))

    both(layer, run)
    layer.exchange()
    layer.assert_equal()


def test_a_pass_that_breaks_off_leaves_nothing(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 5)))

    def break_off(_: Tensor) -> None:
        raise ZeroDivisionError

    def run(one: Any) -> None:
        between = one(whole(4, 5).requires_grad_())
        between.register_hook(break_off)
        with pytest.raises(ZeroDivisionError):
            backward(one, between)
        backward(lambda x: one(one(x)), whole(4, 5))

    both(layer, run)
    assert layer.events.count("captured") == 3
    layer.exchange()
    layer.assert_equal()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool, captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 5)))
    x = whole(4, 5).requires_grad_()
    both(layer, lambda one: backward(lambda x: checkpoint(one, x, use_reentrant=reentrant), x))
    assert layer.layer.rows == 4
    assert layer.events[:2] == ["captured", "settled"]
    layer.exchange()
    layer.assert_equal()


def test_only_passes_that_add_to_gradients_capture(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 3)))
    x = whole(4, 5).requires_grad_()
    for names in (["x"], ["weight"], ["bias"], ["x", "weight"]):
        got, wanted = (
            torch.autograd.grad(
                one(x).pow(2).sum(), [x if name == "x" else getattr(one, name) for name in names]
            )
            for one in (layer.module, layer.plain)
        )
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    (layer.module(x) * whole(4, 3)).sum().backward(inputs=[x])
    assert layer.events == []
    assert layer.module.weight.grad is None


@pytest.mark.parametrize("takes", [True, False], ids=["compact", "dense"])
@pytest.mark.parametrize(
    "module", [nn.Linear(5, 5), nn.Linear(5, 5, bias=False), Conv1D(5, 5)], ids=str
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_gradient_of_the_inputs_gradient_is_torchs_own(
    depth: int, module: nn.Module, takes: bool, captured: Callable[..., Captured]
) -> None:
    """A gradient penalty, as of a WGAN-GP, with and without the loss itself."""
    layer = captured(integral(copy.deepcopy(module)), takes=takes)

    def penalty(one: Any) -> None:
        x = whole(4, 5).requires_grad_()
        out = one(x) if depth == 1 else one(one(x).square())
        weighted = (out * whole(4, 5, seed=3)).sum()
        (gradient,) = torch.autograd.grad(weighted, x, create_graph=True)
        (weighted + gradient.square().sum()).backward()

    for _ in range(2):
        layer.module.zero_grad()
        layer.plain.zero_grad()
        both(layer, penalty)
        layer.exchange()
        layer.assert_equal()


def test_a_gradient_of_the_weights_gradient_is_refused(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 5)))
    out = layer.module(whole(4, 5).requires_grad_())
    wanted = layer.module.weight
    # The gradient of a sum is constant: torch's own decorator would not notice.
    (gradient,) = torch.autograd.grad(out.sum(), wanted, create_graph=True, retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"'layer' may be sent .*push_pull\(\), or name the layer"
    ):
        (out.sum() + gradient.pow(2).sum()).backward(retain_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_create_graph_alone_is_fine(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 3)))
    (layer.module(whole(4, 5)) * whole(4, 3)).sum().backward(create_graph=True)
    (layer.plain(whole(4, 5)) * whole(4, 3)).sum().backward()
    layer.exchange()
    layer.assert_equal()


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("module", [nn.Linear(5, 3), Conv1D(3, 5)], ids=str)
def test_autocast(module: nn.Module, takes: bool, captured: Callable[..., Captured]) -> None:
    layer = captured(integral(copy.deepcopy(module)), takes=takes)

    def run(one: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = one(whole(4, 5))
        assert out.dtype == torch.bfloat16
        (out.float() * whole(4, 3)).sum().backward()

    both(layer, run)
    layer.exchange()
    layer.assert_equal()


def test_autocast_leaves_fp64_alone(captured: Callable[..., Captured]) -> None:
    layer = captured(nn.Linear(5, 3, dtype=torch.float64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.module(whole(4, 5, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen_later(frozen: str, captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 3)))
    for one in (layer.module, layer.plain):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(name != frozen and frozen != "both")
    both(layer, lambda one: backward(one, whole(4, 5).requires_grad_()))
    layer.exchange()
    layer.assert_equal()


def test_without_gradients_nothing_is_captured(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 3)))
    with torch.no_grad():
        assert torch.equal(layer.module(whole(4, 5)), layer.plain(whole(4, 5)))
    assert torch.equal(layer.module(input=whole(4, 5)), layer.plain(input=whole(4, 5)))


def test_inputs_by_name(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(Conv1D(3, 5)))
    assert torch.equal(layer.module(x=whole(4, 5)), layer.plain(x=whole(4, 5)))


def test_forward_that_need_not_capture_is_torchs_own(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 3)))
    layer.may_take = False
    both(layer, lambda module: backward(module, whole(4, 5)))
    layer.assert_equal()
    assert (layer.events, layer.entered) == ([], [])
    assert layer.layer.rows == 4  # the next choice still knows the batch


def test_copies_are_ordinary_layers(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 3)))
    file = io.BytesIO()
    torch.save(layer.module, file)
    file.seek(0)
    copied = copy.deepcopy(layer.module)
    for one in (copied, copy.deepcopy(copied), torch.load(file, weights_only=False)):
        backward(one, whole(4, 5))
        assert one.weight.grad is not None
        assert one.weight is not layer.module.weight
        assert next(named_forms(nn.Sequential(one)))[3] == ""
    assert layer.events == []
    assert layer.layer.rows == 0


def test_lent_weights_have_gradients_of_their_own(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 3)))
    lent = {name: p.detach().clone().requires_grad_() for name, p in layer.plain.named_parameters()}
    backward(lambda x: torch.func.functional_call(layer.module, lent, (x,)), whole(4, 5))
    backward(layer.plain, whole(4, 5))
    assert torch.equal(lent["weight"].grad, layer.plain.weight.grad)
    assert layer.events == []


def test_a_hook_that_would_see_nothing(captured: Callable[..., Captured]) -> None:
    for name in ("weight", "bias"):
        layer = captured(nn.Linear(5, 3))
        getattr(layer.module, name).register_hook(lambda gradient: gradient)
        with pytest.raises(RuntimeError, match="register it before"):
            layer.module(whole(4, 5))


def test_the_end_leaves_no_trace() -> None:
    layer = Captured(integral(nn.Linear(5, 3)))
    layer.end()
    both(layer, lambda one: backward(one, whole(4, 5)))
    assert layer.events == []
    assert "forward" not in vars(layer.module)
    layer.assert_equal()


def test_mean_over_workers_in_rank_order() -> None:
    layers = [Captured(integral(nn.Linear(5, 3))) for _ in range(4)]
    parts = []
    for rank, layer in enumerate(layers[:3]):  # of which one has fewer rows, one none
        backward(layer.module, whole(4 - 2 * rank, 5, seed=rank))
        parts.append(layer.message())
    assert layers[3].message() == []
    target = layers[0]
    target.rebuild(parts, divisor=4)
    for rank in range(3):
        backward(target.plain, whole(4 - 2 * rank, 5, seed=rank))
    for got, wanted in zip(target.parameters, target.plain.parameters(), strict=True):
        assert torch.equal(got.grad, wanted.grad / 4)


def test_bfloat16_wire(captured: Callable[..., Captured]) -> None:
    layer = captured(integral(nn.Linear(5, 3)))
    both(layer, lambda one: backward(one, whole(4, 5)))
    layer.exchange("bfloat16")
    layer.assert_equal()


# ---- obstacles


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


def replaced(module: nn.Module) -> nn.Module:
    module.forward = lambda x: F.linear(x, module.weight)  # type: ignore[method-assign]
    return module


def hooked(name: str, kind: str) -> nn.Module:
    module = nn.Linear(3, 3)
    getattr(getattr(module, name), kind)(lambda _: None)
    return module


def tied(what: str) -> nn.Module:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    setattr(other, what, getattr(one, what))
    return nn.Sequential(one, other)


def frozen(name: str) -> nn.Module:
    module = nn.Linear(3, 3)
    getattr(module, name).requires_grad_(False)
    return module


OBSTACLES = {
    "its weight is parametrized": parametrizations.weight_norm(nn.Linear(3, 3)),
    "its weight is not trained": frozen("weight"),
    "this OwnForward has a forward of its own": OwnForward(3, 3),
    "this Linear has a forward of its own": replaced(nn.Linear(3, 3)),
    "its weight is used without calling it": nn.MultiheadAttention(4, 2).out_proj,
    "its weight is tied to another layer's": tied("weight"),
    "a hook on its weight wants to see the gradient": hooked("weight", "register_hook"),
    "its bias is tied, frozen or hooked": tied("bias"),
    "its weight is float16": nn.Linear(3, 3, dtype=torch.float16),
    "its weight is complex64": nn.Linear(3, 3, dtype=torch.complex64),
    "max_norm or scale_grad_by_freq changes its gradient": nn.Embedding(3, 3, max_norm=1.0),
}
MORE_OBSTACLES = [
    ("its bias is tied, frozen or hooked", frozen("bias")),
    ("its bias is tied, frozen or hooked", hooked("bias", "register_post_accumulate_grad_hook")),
    (
        "a hook on its weight wants to see the gradient",
        hooked("weight", "register_post_accumulate_grad_hook"),
    ),
    (
        "max_norm or scale_grad_by_freq changes its gradient",
        nn.Embedding(3, 3, scale_grad_by_freq=True),
    ),
]


@pytest.mark.parametrize(("reason", "module"), [*OBSTACLES.items(), *MORE_OBSTACLES])
def test_obstacles_have_reasons(reason: str, module: nn.Module) -> None:
    told = [why for _, _, _, why in named_forms(nn.Sequential(module))]
    assert told
    assert set(told) == {reason}
    assert {spec.obstacle for spec in Inventory.of(nn.Sequential(module)).specs} <= {reason, ""}


def test_a_compiled_model_has_obstacles_throughout() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(3, 3)), backend="eager")
    assert {why for *_, why in named_forms(model)} == {"the model is compiled"}


def test_layers_without_obstacles() -> None:
    model = nn.Sequential(
        nn.Linear(3, 3, dtype=torch.bfloat16), nn.Embedding(3, 3, padding_idx=0), nn.Conv2d(1, 1, 1)
    )
    assert [(name, form, why) for name, _, form, why in named_forms(model)] == [
        ("0", "factors", ""),
        ("1", "rows", ""),
    ]
    layers = [spec.layer for spec in Inventory.of(model).specs]
    assert layers == ["0", "0", "1", "", ""]


def test_a_transposed_layer_is_planned_by_its_inputs_and_outputs() -> None:
    specs = Inventory.of(nn.Sequential(Conv1D(3, 5), nn.Linear(5, 3))).specs
    assert [(each.outputs, each.inputs, each.transposed) for each in layers_of(specs)] == [
        (3, 5, True),
        (3, 5, False),
    ]


def test_a_transposed_layer_with_a_forward_of_its_own() -> None:
    class Scaled(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert [why for *_, why in named_forms(nn.Sequential(Scaled(3, 5)))] == [
        "this Scaled has a forward of its own"
    ]


def test_without_transformers_a_layer_of_this_name_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "transformers.pytorch_utils")
    assert form_of(Conv1D(3, 5)) is None


def test_servers_compute_the_same_gradient_of_a_transposed_layer() -> None:
    """``adam_factors``: numpy multiplies at the servers."""
    specs = Inventory.of(nn.Sequential(Conv1D(3, 5))).specs
    (layer,) = layers_of(specs)
    x, dy = whole(4, 5), whole(4, 3, seed=1)
    made = LayerGradients(adam_factors().plan(specs, Cluster(workers=2, servers=1)))
    raw = (Values(each.reshape(-1).view(torch.uint8).numpy(), "float32") for each in (dy, x))
    made.multiply(layer, *raw, rows=4, share=1.0)
    weight = torch.from_numpy(made.flat[layer.weight].data).view(torch.float32).view(5, 3)
    assert torch.equal(weight, x.t() @ dy)
