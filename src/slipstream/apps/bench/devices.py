"""Emulated devices: nets that wait instead of computing, with real parameters and gradients.

A layer's forward and backward take the time in its table; its gradient has the right shape and is
passed on by autograd through the same hooks, layer by layer, as a real one. Contents are noise that
is drawn once: a gradient's memory is reused, and backward writes nothing to it. So many workers can
share a few cores, and the measurement shows the communication.

Fully connected layers are ``nn.Linear``: a forward pre-hook sees X (K × N), and a hook on the
output sees dY (K × M), both of them memory with K rows. Set ``on_factors`` to get
both in backward *instead of* dense gradients for weight and bias; computing a dense gradient from
them (``rebuild``) then takes the time of its flops, at the device's speed in the table.

Branches run one after the other, in the table's order. Only the weight update is really computed;
``include_update`` counts it as part of the table's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.apps.bench.noise import Noise, Rows
from slipstream.apps.bench.tables import Layer, Table
from slipstream.apps.bench.timeline import Timeline
from slipstream.errors import ConfigError

WEIGHT_SCALE = 0.01
GRADIENT_SCALE = 0.001

Factors = Callable[[Tensor, Tensor], bool]  # gets X and dY; returns whether it takes them


class Work:
    """One layer's time on the device, and the memory of its gradients."""

    def __init__(
        self,
        layer: Layer,
        batch: int,
        timeline: Timeline,
        parameters: Sequence[nn.Parameter],
        noise: Noise,
    ) -> None:
        self._forward_s = layer.forward_ms / 1000 / batch
        self._backward_s = layer.backward_ms / 1000 / batch
        self._timeline = timeline
        self._parameters = parameters
        self._memory = [noise.make(tuple(parameter.shape)) for parameter in parameters]

    def forward(self, rows: int) -> None:
        self._timeline.run(self._forward_s * rows)

    def backward(self, rows: int) -> None:
        self._timeline.run(self._backward_s * rows)

    def gradients(self, wanted: Sequence[bool]) -> Iterator[Tensor | None]:
        for parameter, memory, is_wanted in zip(
            self._parameters, self._memory, wanted, strict=True
        ):
            if not is_wanted:
                yield None
            elif parameter.grad is None:
                # An alias without other references: autograd takes it without a copy.
                yield memory.detach()
            else:
                # Accumulating: the memory added to itself would double every time.
                yield memory.new_full((), GRADIENT_SCALE).expand_as(memory)


class _Occupy(torch.autograd.Function):
    """An identity function that keeps the device busy."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, work: Work, *_parameters: Tensor) -> Tensor:
        ctx.work, ctx.rows = work, len(signal)
        work.forward(ctx.rows)
        return signal.view_as(signal)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.work.backward(ctx.rows)
        return gradients[0], None, *ctx.work.gradients(ctx.needs_input_grad[2:])


class _Multiply(torch.autograd.Function):
    """A function from K × N to K × M."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: EmulatedLinear, *_parameters: Tensor) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(x)
        linear.work.forward(len(x))
        return linear.outputs.take(len(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        linear, (x,), wanted = ctx.linear, ctx.saved_tensors, ctx.needs_input_grad[2:]
        linear.work.backward(len(x))
        if linear.on_factors is not None and linear.on_factors(x, gradients[0]):
            wanted = [False] * len(wanted)
        return linear.input_gradients.take(len(x)), None, *linear.work.gradients(wanted)


class _Reshape(torch.autograd.Function):
    """A function from rows of any length to rows of another."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, outputs: Rows, input_gradients: Rows) -> Tensor:
        ctx.input_gradients, ctx.rows = input_gradients, len(signal)
        return outputs.take(ctx.rows)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        return ctx.input_gradients.take(ctx.rows), None, None


# Torch's type stubs do not describe the arguments and result of ``apply``.
occupy: Callable[..., Tensor] = _Occupy.apply
multiply: Callable[..., Tensor] = _Multiply.apply
reshape: Callable[..., Tensor] = _Reshape.apply


class EmulatedLayer(nn.Module):
    """Any layer except a fully connected one."""

    def __init__(
        self, layer: Layer, batch: int, timeline: Timeline, weights: Noise, gradients: Noise
    ) -> None:
        super().__init__()
        for name, shape in layer.named_shapes.items():
            self.register_parameter(name, nn.Parameter(weights.make(shape)))
        self.work = Work(layer, batch, timeline, tuple(self.parameters()), gradients)

    def forward(self, signal: Tensor) -> Tensor:
        return occupy(signal, self.work, *self.parameters())


class EmulatedLinear(nn.Linear):
    """A fully connected layer without a multiplication."""

    def __init__(
        self, layer: Layer, batch: int, timeline: Timeline, weights: Noise, gradients: Noise
    ) -> None:
        outputs, inputs = layer.shapes[0]
        super().__init__(inputs, outputs, bias="bias" in layer.named_shapes, device="meta")
        for name, shape in layer.named_shapes.items():
            self.register_parameter(name, nn.Parameter(weights.make(shape)))
        self.work = Work(layer, batch, timeline, tuple(self.parameters()), gradients)
        self.outputs = Rows(gradients, outputs)
        self.input_gradients = Rows(gradients, inputs)
        self.on_factors: Factors | None = None
        self._rows = 0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name for it
        self._rows = len(input)
        return multiply(input, self, *self.parameters())

    def rebuild(self, rows: int) -> None:
        """Keep busy for a GEMM over all workers' rows, not over this worker's own in backward."""
        self.work.forward(rows - self._rows)
        wanted = [parameter.requires_grad for parameter in self.parameters()]
        for parameter, gradient in zip(self.parameters(), self.work.gradients(wanted), strict=True):
            parameter.grad = gradient


class Reshaping(nn.Module):
    """A layer between others whose columns differ, for pooling or flattening; takes no time."""

    def __init__(self, inputs: int, outputs: int, noise: Noise) -> None:
        super().__init__()
        self._outputs = Rows(noise, outputs)
        self._input_gradients = Rows(noise, inputs)

    def forward(self, signal: Tensor) -> Tensor:
        return reshape(signal, self._outputs, self._input_gradients)


class EmulatedNet(nn.Sequential):
    """A table's layers in order, on one device; ``seed`` determines its gradients' contents.

    It uses only the number of rows of its input, and takes a row's share of the table's time for
    each. The output has rows of the last fully connected layer, for any loss.
    """

    def __init__(self, table: Table, *, timeline: Timeline | None = None, seed: int = 0) -> None:
        super().__init__()
        self.table = table
        self.timeline = timeline or Timeline()
        weights, gradients = Noise(0, WEIGHT_SCALE), Noise(seed, GRADIENT_SCALE)
        parts = (table.batch, self.timeline, weights, gradients)
        columns = 1
        for layer in table.layers:
            name = layer.module
            if layer.kind != "fc":
                self.add_module(name, EmulatedLayer(layer, *parts))
                continue
            outputs, inputs = layer.shapes[0]
            if inputs != columns:
                self.add_module(f"{name}/reshape", Reshaping(columns, inputs, gradients))
            self.add_module(name, EmulatedLinear(layer, *parts))
            columns = outputs
        self.columns = columns

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name for it
        if input.dim() == 0 or len(input) == 0:
            raise ConfigError("an emulated net needs at least one row of input")
        # It requires a gradient, so that layers without parameters have a backward too.
        signal = torch.zeros(len(input), 1, requires_grad=torch.is_grad_enabled())
        for layer in self:
            signal = layer(signal)
        return signal

    def include_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the optimizer's own work as part of the step, since a published speed includes it.

        Call it after the job has hooked into the optimizer; otherwise waits for others count too.
        """
        running = ExitStack()
        optimizer.register_step_pre_hook(lambda *_: running.enter_context(self.timeline.included()))
        optimizer.register_step_post_hook(lambda *_: running.close())
