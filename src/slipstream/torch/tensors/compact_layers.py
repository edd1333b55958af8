"""Layers whose gradient has a compact form, and its capture instead of the dense gradient.

A fully connected layer's weight gradient is dYᵀX: the ``rows`` of X and dY carry the same
information in fewer numbers, and the bias's gradient is the sum of dY's rows. An embedding's
gradient has few nonzero rows: their ids and values carry the same information. Hugging Face's
``Conv1D`` (GPT-2) is a fully connected layer, too: x W + b, with the gradient XᵀdY.

Autograd gets a layer's weight gradient through a small node of its own (``_Gradient``), so that
a pass that needs only the gradient of the input captures nothing. The node either hands over
the compact form, and the dense gradient is never computed here, or computes the dense one as torch
would. What was captured counts when torch would have added to ``.grad``: when the backward of all
uses of the layer in a pass has run; it does not count if the pass is aborted before.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from slipstream.planning.costs import Form, LayerShape
from slipstream.torch.tensors.accumulation_hook import AccumulationHook
from slipstream.torch.tensors.embedding_bags import embedding_bags
from slipstream.torch.tensors.plain_copies import ModuleHook, ReplacedForward, keep_copies_plain


@dataclass(frozen=True, slots=True)
class Captured:
    """A layer's gradient: X and dY, or ids and values of rows.

    ``ahead`` is the round for which X was already sent, in the forward pass, if it was.
    """

    first: Tensor
    second: Tensor
    ahead: int | None = None


@dataclass(slots=True)
class CompactLayer:
    """One such layer: its tensors' places in the inventory, and what was captured in this step."""

    shape: LayerShape
    module: Any
    weight: int
    bias: int | None
    unit: int = 0  # of the plan
    pending: list[Captured] = field(default_factory=list)
    rows: int = 0  # of all forward passes since the last exchange
    calls: int = 0  # number of such passes
    once: bool = False  # whether the last exchange had exactly one such pass
    assigned: bool = False  # whether the loop put all of the last contribution into .grad itself
    # Captured in passes that may still be aborted, by pass: re-entrant checkpointing nests them.
    _open: dict[int, list[Captured]] = field(default_factory=dict)
    transposed: bool = field(init=False)  # whether the weight is inputs × outputs

    def __post_init__(self) -> None:
        self.transposed = is_transposed(self.module)

    @classmethod
    def of(
        cls, name: str, module: Any, form: Form, place_of: Mapping[int, int], unit: int = 0
    ) -> CompactLayer:
        """A layer of which nothing is captured yet.

        Args:
            place_of: By a parameter's identity: its place in the inventory.
        """
        bias = getattr(module, "bias", None)
        bias_place = None if bias is None else place_of[id(bias)]
        shape = shape_of(name, module, form)
        return cls(shape, module, place_of[id(module.weight)], bias_place, unit)

    @property
    def tensors(self) -> tuple[int, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def parameters(self) -> tuple[Any, ...]:
        return (self.module.weight, getattr(self.module, "bias", None))

    @property
    def expected_rows(self) -> int:
        """The rows that its gradient takes: a dense matrix has as many as its shorter side."""
        if self.assigned and self.shape.form == "factors":
            return min(self.shape.outputs, self.shape.inputs) + self.shape.bias
        return self.rows

    def product(self, x: Tensor, dy: Tensor) -> Tensor:
        """A fully connected layer's weight gradient."""
        return x.t() @ dy if self.transposed else dy.t() @ x

    def keep(self, first: Tensor, second: Tensor, ahead: int | None = None) -> None:
        """The compact gradient of one use, within a backward pass."""
        this_pass = torch._C._current_graph_task_id()
        captured = Captured(first.detach(), second.detach(), ahead)
        self._open.setdefault(this_pass, []).append(captured)

    def finish(self) -> bool:
        """The backward of all uses in this pass has run; returns whether there were any."""
        captured = self._open.pop(torch._C._current_graph_task_id(), [])
        self.pending += captured
        self.assigned = False
        return bool(captured)

    def detach(self) -> None:
        """Copy what is pending: the inputs may be overwritten before they are sent."""
        self.pending = [
            replace(c, first=c.first.clone(), second=c.second.clone()) for c in self.pending
        ]

    def reset(self) -> None:
        """The exchange of this step is over, or the gradient took another route."""
        self.pending, self.rows, self.calls = [], 0, 0
        self._open.clear()

    def take(self) -> Captured | None:
        """Take all that was captured, and start again; None if the layer was not used."""
        pending, self.pending = self.pending, []
        self.once = self.calls == 1 and len(pending) == 1
        self.calls = 0
        if not pending:
            return None
        whole = stacked(pending)
        return self._distinct(whole.first, whole.second) if self.shape.form == "rows" else whole

    def _distinct(self, ids: Tensor, values: Tensor) -> Captured:
        """Every used row once."""
        ids, values = self.without_padding(ids, values)
        touched, where = torch.unique(ids, return_inverse=True)
        summed = values.new_zeros(len(touched), values.shape[1])
        return Captured(touched, summed.index_add_(0, where, values))

    def without_padding(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """An embedding's row for padding has no gradient."""
        if self.module.padding_idx is None:
            return ids, values
        kept = ids != self.module.padding_idx
        return ids[kept], values[kept]


def stacked(parts: Sequence[Captured]) -> Captured:
    """The sum of several gradients of a layer; one alone stays as it is."""
    if len(parts) == 1:
        return parts[0]
    firsts, seconds = zip(*((part.first, part.second) for part in parts), strict=True)
    return Captured(torch.cat(firsts), torch.cat(seconds))


@dataclass(frozen=True, slots=True)
class Ports:
    """Callbacks to which layers hand over what they capture."""

    may_take: Callable[[CompactLayer], bool]  # False: its gradient is surely dense in this step
    entered: Callable[[CompactLayer, Tensor], int | None]  # with X; returns its round, if sent
    takes: Callable[[CompactLayer], bool]  # whether it is needed in this step
    captured: Callable[[CompactLayer], None]  # one use
    finished: Callable[[CompactLayer], None]  # all uses in a pass; nothing may have been captured
    way_out: str = "use push_pull(), or name the layer in poseidon(dense=[...])"  # of a refusal


@dataclass(slots=True)
class Use:
    """One call of a layer, between its forward and its backward."""

    layer: CompactLayer
    ports: Ports
    first: Tensor | None = None
    second: Tensor | None = None
    ahead: int | None = None
    of_input: bool = False  # not of the layer's output, but of its input's gradient

    def once(self, gradient: Tensor | None) -> Tensor | None:
        """The gradient; under ``create_graph`` as a tensor that cannot be differentiated again."""
        if gradient is None or not torch.is_grad_enabled():
            return gradient
        name, way_out = self.layer.shape.name, self.ports.way_out
        return refuse_twice(gradient.detach().requires_grad_(), name, way_out)


class _RefuseTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, name: str, way_out: str) -> Tensor:
        ctx.name, ctx.way_out = name, way_out
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"the gradient of {ctx.name!r} may be sent in compact form, and so can the gradient of "
            "its input's gradient, but it cannot be differentiated in other ways "
            f"(create_graph=True): {ctx.way_out}"
        )


class _Gradient(torch.autograd.Function):
    """Autograd calls it for the gradients of weight and bias only if it needs them."""

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
        if accumulates(ctx) and use.ports.takes(use.layer):
            if use.of_input and use.layer.bias is not None:
                # The bias's gradient is the sum of dY, but the input's gradient has no bias in it.
                first = torch.cat([first, torch.zeros_like(first)])
                second = torch.cat([second, -second])
            use.layer.keep(first, second, use.ahead)
            use.ports.captured(use.layer)
            return None, None, None
        if use.layer.shape.form == "rows":
            ids, values = use.layer.without_padding(first, second)
            table = values.new_zeros(ctx.weight_shape).index_add_(0, ids, values)
            return use.once(table), None, None
        weight = use.layer.product(first, second) if ctx.needs_input_grad[0] else None
        bias = second.sum(0) if ctx.needs_input_grad[1] else None
        return use.once(weight), use.once(bias), None


def accumulates(node: Any) -> bool:
    """Whether this pass adds to ``.grad``; ``autograd.grad`` returns gradients to its caller."""
    leaves = [leaf for leaf, _ in node.next_functions if leaf is not None]
    try:
        return all(torch._C._will_engine_execute_node(leaf) for leaf in leaves)
    except RuntimeError:  # raised if autograd.grad was called for this leaf
        return False


def as_rows(tensor: Tensor) -> Tensor:
    """All but the last dimension as one. Rows are computed, not inferred with -1, so that empty
    tensors work."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


class _Linear(torch.autograd.Function):
    """x Wᵀ + b; keeps X and dY for the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _port: Tensor, use: Use
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.use = use
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dy,) = gradients
        x, weight = ctx.saved_tensors
        ctx.use.first, ctx.use.second = as_rows(x.detach()), as_rows(dy.detach())
        dx = None
        if ctx.needs_input_grad[0]:
            again = torch.is_grad_enabled()  # create_graph=True
            dx = differentiable_gradient(dy, weight, ctx.use) if again else dy.matmul(weight)
        return dx, None, None, dy.new_zeros(()), None


class _InputGradient(torch.autograd.Function):
    """dY W, which may be differentiated once more: its own gradient dV makes dYᵀdV of the weight's.

    So X and dY of this use are dV and dY.
    """

    @staticmethod
    def forward(ctx: Any, dy: Tensor, weight: Tensor, _port: Tensor, use: Use) -> Tensor:
        ctx.save_for_backward(dy, weight)
        ctx.use = use
        return dy.matmul(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dv,) = gradients
        dy, weight = ctx.saved_tensors
        ctx.use.first, ctx.use.second = as_rows(dv.detach()), as_rows(dy.detach())
        with torch.no_grad():
            ddy = dv.matmul(weight.t()) if ctx.needs_input_grad[0] else None
        return ctx.use.once(ddy), None, dv.new_zeros(()), None


def differentiable_gradient(dy: Tensor, weight: Tensor, use: Use) -> Tensor:
    """The gradient of a fully connected layer's input, with a port of its own to the weight."""
    second = Use(use.layer, use.ports, of_input=True)
    return input_gradient(dy, weight, gradient_port(use.layer.module.weight, None, second), second)


class _Embedding(torch.autograd.Function):
    """Rows of a table; keeps ids and dY."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, _port: Tensor, use: Use) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.use = use
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dy,) = gradients
        (ids,) = ctx.saved_tensors
        ctx.use.first, ctx.use.second = ids.reshape(-1).long(), as_rows(dy.detach())
        return None, None, dy.new_zeros(()), None


# Torch's type stubs do not describe the arguments and result of ``apply``.
gradient_port: Callable[..., Tensor] = _Gradient.apply
refuse_twice: Callable[..., Tensor] = _RefuseTwice.apply
linear: Callable[..., Tensor] = _Linear.apply
input_gradient: Callable[..., Tensor] = _InputGradient.apply
embedding: Callable[..., Tensor] = _Embedding.apply


class Forward(ReplacedForward):
    """Replaces a layer's ``forward``; a copy of the layer gets the original forward back."""

    def __init__(self, layer: CompactLayer, ports: Ports) -> None:
        super().__init__(layer.module)
        self.layer, self.ports = layer, ports
        self._parameters = layer.parameters

    @torch.compiler.disable
    def __call__(
        self,
        input: Tensor,  # noqa: A002 - torch's own names
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """The arguments after the first are those of an ``nn.EmbeddingBag``."""
        weight, bias = self.layer.parameters
        of_bags = isinstance(self.layer.module, nn.EmbeddingBag)
        more = (offsets, per_sample_weights) if of_bags else ()
        if weight is not self._parameters[0] or bias is not self._parameters[1]:
            return self.plain()(input, *more)  # functional_call replaces the parameters
        self._count(input)
        trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        captures = torch.is_grad_enabled() and trained and self.ports.may_take(self.layer)
        if not captures:
            return self.plain()(input, *more)
        self._refuse_hooks(weight, bias)
        use = Use(self.layer, self.ports)
        port = gradient_port(weight, bias, use)
        if of_bags:
            return embedding_bags(input, weight.detach(), *more, port, self.layer.module, use)
        if self.layer.shape.form == "rows":
            return embedding(input, weight.detach(), port, use)
        matrix = weight.detach().t() if self.layer.transposed else weight.detach()
        x, w, b = autocast(input, matrix, bias)
        if not recomputing():
            use.ahead = self.ports.entered(self.layer, as_rows(x.detach()))
        return linear(x, w, None if b is None else b.detach(), port, use)

    def _count(self, inputs: Tensor) -> None:
        """Count once, though checkpointing runs a forward twice: without gradients, or in
        backward."""
        wanted = self.layer.module.training or torch.is_grad_enabled()
        if wanted and not recomputing():
            self.layer.calls += 1
            ids = self.layer.shape.form == "rows"
            self.layer.rows += inputs.numel() if ids else math.prod(inputs.shape[:-1])

    def _refuse_hooks(self, *parameters: Tensor | None) -> None:
        if any(p is not None and p._backward_hooks for p in parameters):
            raise RuntimeError(
                f"a hook was registered on a parameter of {self.layer.shape.name!r} after "
                "job.distribute, which would not see its gradient: register it before, and the "
                "layer travels dense"
            )


class TransposedForward(Forward):
    """Of Hugging Face's ``Conv1D``, which names its input x."""

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = super().__call__(x)
        return out


def recomputing() -> bool:
    """Whether a forward runs within a backward pass, as with checkpointing."""
    return bool(torch._C._current_graph_task_id() >= 0)


def autocast(x: Tensor, *parameters: Tensor | None) -> list[Any]:
    """A linear layer's inputs as autocast would cast them."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return [x, *parameters]
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype), *(None if p is None else p.to(dtype) for p in parameters)]


def capture(layers: Sequence[CompactLayer], ports: Ports) -> Callable[[], None]:
    """Let the layers hand over their gradients; returns a function that ends this."""
    handles: list[Any] = []
    for layer in layers:
        keep_copies_plain(layer.module)
        if hasattr(layer.module, "on_factors"):  # an emulated device provides factors itself
            layer.module.on_factors = partial(_offered, layer, ports)
            counting = ModuleHook(partial(_count_rows, layer))
            handles.append(layer.module.register_forward_pre_hook(counting))
        else:
            kind = TransposedForward if layer.transposed else Forward
            layer.module.forward = kind(layer, ports)
        for parameter in layer.parameters:
            if parameter is not None:
                handles.append(AccumulationHook(parameter, partial(ports.finished, layer)))

    def end() -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
        for layer in layers:
            if hasattr(layer.module, "on_factors"):
                layer.module.on_factors = None
            elif isinstance(vars(layer.module).get("forward"), Forward):
                del layer.module.forward

    return end


def _count_rows(layer: CompactLayer, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if torch.is_grad_enabled():
        layer.calls += 1
        layer.rows += len(inputs[0])


def _offered(layer: CompactLayer, ports: Ports, x: Tensor, dy: Tensor) -> bool:
    """An emulated device offers factors; returns whether they are taken."""
    if not ports.takes(layer):
        return False
    layer.keep(x, dy)
    ports.captured(layer)
    return True


# ---- which layers


def named_forms(model: nn.Module) -> Iterator[tuple[str, nn.Module, Form, str]]:
    """Every layer that might have a compact gradient: its name, its form, and the obstacle, if
    any."""
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
    """The compact form that a layer's gradient has; None if it has none."""
    if isinstance(module, nn.Linear) or is_transposed(module):
        return "factors"
    return "rows" if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None


def transposed_linear() -> type[Any] | None:
    """Hugging Face's ``Conv1D``; None if transformers is not imported: no model has one then."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def is_transposed(module: nn.Module) -> bool:
    """Whether it is a fully connected layer whose weight is inputs × outputs."""
    kind = transposed_linear()
    return kind is not None and isinstance(module, kind)


def obstacle(module: Any, form: Form, owners: Mapping[int, int], *, compiled: bool) -> str:
    """Why a layer's gradient cannot be captured; empty if it can."""
    if parametrize.is_parametrized(module):
        return "its weight is parametrized"
    weight = module.weight
    if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
        return "its weight is not trained"
    if not weight.numel():
        return "its weight is empty"
    known = (nn.Linear, nn.Embedding, nn.EmbeddingBag, transposed_linear())
    plain = [kind.forward for kind in known if kind is not None]
    own = getattr(module.forward, "__func__", None) not in plain
    if own and not hasattr(module, "on_factors"):
        return f"this {type(module).__name__} has a forward of its own"
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "its weight is used without calling it"
    if owners[id(weight)] > 1:
        return "its weight is tied to another layer's"
    if is_hooked(weight):
        return "a hook on its weight wants to see the gradient"
    bias = getattr(module, "bias", None)
    if bias is not None and (owners[id(bias)] > 1 or not bias.requires_grad or is_hooked(bias)):
        return "its bias is tied, frozen or hooked"
    if weight.is_complex() or weight.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if compiled:
        return "the model is compiled"
    if form == "rows" and (module.max_norm is not None or module.scale_grad_by_freq):
        return "max_norm or scale_grad_by_freq changes its gradient"
    if getattr(module, "mode", "sum") == "max":
        return "the maximum of rows has a gradient of single values"
    return ""


def is_hooked(parameter: Any) -> bool:
    return bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def shape_of(name: str, module: Any, form: Form) -> LayerShape:
    matrix = module.weight.shape
    outputs, inputs = reversed(matrix) if is_transposed(module) else matrix
    bias = getattr(module, "bias", None) is not None
    return LayerShape(name, form, outputs, inputs, bias, module.weight.element_size())
