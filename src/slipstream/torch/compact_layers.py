"""Layers whose gradient has a compact form, and its capture in place of the dense one.

A fully connected layer's weight gradient is dYᵀX: ``rows`` of X and of dY say the same in fewer
numbers, and the bias's is the sum of dY's rows. An embedding's touches few rows: their ids and
values say the same.

Autograd asks for a layer's weight gradient through a small node of its own (``_Gradient``), so that
a pass which wants only the gradient of the input captures nothing. The node then either hands over
the compact form, and the dense gradient is never computed here, or computes the dense one as torch
would.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from slipstream.planning.costs import Form, LayerShape


@dataclass(slots=True)
class CompactLayer:
    """One such layer: its tensors' places in the inventory, and what this step has given so far."""

    shape: LayerShape
    module: Any
    weight: int
    bias: int | None
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    rows: int = 0  # of the forward passes since the last exchange
    uses: int = 0
    captured: int = 0

    @property
    def tensors(self) -> tuple[int, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def enter(self, rows: int) -> None:
        """A forward pass whose backward may follow."""
        self.rows += rows
        self.uses += 1

    def keep(self, first: Tensor, second: Tensor) -> None:
        """The compact gradient of one use."""
        self.pending.append((first.detach(), second.detach()))
        self.captured += 1

    @property
    def complete(self) -> bool:
        """Whether every use has had its backward."""
        return self.captured >= self.uses

    def reset(self) -> None:
        """The exchange of this step is over, or the gradient went another way."""
        self.pending = []
        self.rows = self.uses = self.captured = 0

    def take(self) -> tuple[Tensor, Tensor] | None:
        """All of it, and begin anew; None if the layer was not used."""
        pending = self.pending
        self.reset()
        if not pending:
            return None
        first, second = (
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*pending, strict=True)
        )
        return self._distinct(first, second) if self.shape.form == "rows" else (first, second)

    def _distinct(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Every touched row once."""
        if self.module.padding_idx is not None:
            kept = ids != self.module.padding_idx
            ids, values = ids[kept], values[kept]
        touched, where = torch.unique(ids, return_inverse=True)
        summed = values.new_zeros(len(touched), values.shape[1])
        return touched, summed.index_add_(0, where, values)


class Ports:
    """Where layers hand over what they capture; ``takes`` tells which, step by step."""

    def __init__(
        self, takes: Callable[[CompactLayer], bool], captured: Callable[[CompactLayer], None]
    ) -> None:
        self.takes = takes
        self.captured = captured


@dataclass(slots=True)
class Use:
    """One call of a layer, between its forward and its backward."""

    layer: CompactLayer
    ports: Ports
    first: Tensor | None = None
    second: Tensor | None = None


class _Gradient(torch.autograd.Function):
    """Asked by autograd for the gradients of weight and bias, if and only if it wants them."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, use: Use) -> Tensor:
        ctx.use = use
        ctx.weight_shape = weight.shape
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_asked: Any) -> Any:
        use: Use = ctx.use
        first, second = use.first, use.second
        use.first = use.second = None
        if first is None or second is None:
            return None, None, None
        if ctx.needs_input_grad[0] and use.ports.takes(use.layer):
            use.layer.keep(first, second)
            use.ports.captured(use.layer)
            return None, None, None
        if use.layer.shape.form == "rows":
            dense = second.new_zeros(ctx.weight_shape)
            padding = use.layer.module.padding_idx
            if padding is not None:
                kept = first != padding
                first, second = first[kept], second[kept]
            return dense.index_add_(0, first, second), None, None
        weight = second.t() @ first if ctx.needs_input_grad[0] else None
        bias = second.sum(0) if ctx.needs_input_grad[1] else None
        return weight, bias, None


class _Linear(torch.autograd.Function):
    """x Wᵀ + b; keeps X and dY for whoever asks for the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _port: Tensor, use: Use
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.use = use
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dy,) = gradients
        x, weight = ctx.saved_tensors
        ctx.use.first = x.reshape(-1, x.shape[-1])
        ctx.use.second = dy.reshape(-1, dy.shape[-1])
        dx = dy.matmul(weight) if ctx.needs_input_grad[0] else None
        return dx, None, None, dy.new_zeros(()), None


class _Embedding(torch.autograd.Function):
    """Rows of a table; keeps ids and dY."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, _port: Tensor, use: Use) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.use = use
        return F.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dy,) = gradients
        (ids,) = ctx.saved_tensors
        ctx.use.first = ids.reshape(-1).long()
        ctx.use.second = dy.reshape(-1, dy.shape[-1])
        return None, None, dy.new_zeros(()), None


# Torch's types do not say what ``apply`` takes and gives.
gradient_port: Callable[..., Tensor] = _Gradient.apply
linear: Callable[..., Tensor] = _Linear.apply
embedding: Callable[..., Tensor] = _Embedding.apply


class Forward:
    """Takes the place of a layer's ``forward``; a copy of the layer gets its own old one back."""

    def __init__(self, layer: CompactLayer, ports: Ports) -> None:
        self.layer, self.ports = layer, ports

    def __call__(self, inputs: Tensor) -> Tensor:
        module, weight = self.layer.module, self.layer.module.weight
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return self._plain(module)(inputs)
        self._refuse_hooks(weight)
        use = Use(self.layer, self.ports)
        if self.layer.shape.form == "rows":
            self.layer.enter(inputs.numel())
            return embedding(inputs, weight.detach(), gradient_port(weight, None, use), use)
        self.layer.enter(inputs.numel() // max(1, inputs.shape[-1]))
        port = gradient_port(weight, module.bias, use)
        x, w, b = autocast(inputs, weight.detach(), module.bias)
        return linear(x, w, None if b is None else b.detach(), port, use)

    def _refuse_hooks(self, weight: Tensor) -> None:
        if weight._backward_hooks:
            raise RuntimeError(
                f"a hook was registered on the weight of {self.layer.shape.name!r} after "
                "job.distribute, which would not see its gradient: register it before, and the "
                "layer travels dense"
            )

    @staticmethod
    def _plain(module: nn.Module) -> Callable[..., Tensor]:
        return types.MethodType(type(module).forward, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.layer.module))
        return self if copied is None else self._plain(copied)

    def __reduce__(self) -> Any:
        module = self.layer.module
        return types.MethodType, (type(module).forward, module)


def autocast(x: Tensor, *parameters: Tensor | None) -> list[Any]:
    """What autocast would make of a linear layer's inputs."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return [x, *parameters]
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype), *(None if p is None else p.to(dtype) for p in parameters)]


def capture(layers: Sequence[CompactLayer], ports: Ports) -> Callable[[], None]:
    """Let the layers hand over their gradients; returns what ends it."""
    for layer in layers:
        if hasattr(layer.module, "on_factors"):  # an emulated device offers them itself
            layer.module.on_factors = _offered(layer, ports)
        else:
            layer.module.forward = Forward(layer, ports)

    def end() -> None:
        for layer in layers:
            if hasattr(layer.module, "on_factors"):
                layer.module.on_factors = None
            else:
                del layer.module.forward

    return end


def _offered(layer: CompactLayer, ports: Ports) -> Callable[[Tensor, Tensor], bool]:
    def offered(x: Tensor, dy: Tensor) -> bool:
        layer.enter(len(x))
        if not ports.takes(layer):
            return False
        layer.keep(x, dy)
        ports.captured(layer)
        return True

    return offered


# ---- which layers


def named_forms(model: nn.Module) -> Iterator[tuple[str, nn.Module, Form, str]]:
    """Every layer that might have a compact gradient: its name, its form, and what stands against
    it, if anything."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    compiled = any(is_compiled(module) for module in model.modules())
    for name, module in model.named_modules():
        form = form_of(module)
        if form is not None:
            yield name, module, form, obstacle(module, form, owners, compiled=compiled)


def form_of(module: nn.Module) -> Form | None:
    if isinstance(module, nn.Linear):
        return "factors"
    return "rows" if isinstance(module, nn.Embedding) else None


def obstacle(module: Any, form: Form, owners: Mapping[int, int], *, compiled: bool) -> str:
    """Why a layer's gradient cannot be captured; empty if it can."""
    if parametrize.is_parametrized(module):
        return "its weight is parametrized"
    weight = module.weight
    if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
        return "its weight is not trained"
    plain = nn.Linear.forward if form == "factors" else nn.Embedding.forward
    if type(module).forward is not plain and not hasattr(module, "on_factors"):
        return f"{type(module).__name__} has a forward of its own"
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "its weight is used without calling it"
    if owners[id(weight)] > 1:
        return "its weight is tied to another layer's"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "a hook on its weight wants to see the gradient"
    bias = getattr(module, "bias", None)
    if bias is not None and (
        owners[id(bias)] > 1 or not bias.requires_grad or bias._backward_hooks
    ):
        return "its bias is tied, frozen or hooked"
    if weight.is_complex() or weight.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if compiled:
        return "the model is compiled"
    if form == "rows" and (module.max_norm is not None or module.scale_grad_by_freq):
        return "max_norm or scale_grad_by_freq changes its gradient"
    return ""


def is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def shape_of(name: str, module: Any, form: Form) -> LayerShape:
    outputs, inputs = module.weight.shape
    bias = getattr(module, "bias", None) is not None
    return LayerShape(name, form, outputs, inputs, bias, module.weight.element_size())
