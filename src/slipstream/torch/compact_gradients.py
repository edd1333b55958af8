"""Layers' gradients in compact form: from their capture in autograd to the channel.

A layer's matrices leave as soon as its backward has ended. Half of a fully connected layer's, its
inputs, are known in the forward pass: where a layer was called just once in the step before, they
leave at once; its backward then says whether they hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.codecs import LayerCodec
from slipstream.codecs.matrices import Matrix
from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.runtime.exchange.channel import LayerChannel
from slipstream.runtime.exchange.choices import LayerChoices
from slipstream.runtime.exchange.send_buffers import Loan
from slipstream.torch.compact_layers import Captured, CompactLayer
from slipstream.torch.finite_gradients import FiniteGradients, magnitude_of
from slipstream.torch.inventory import dtype_name
from slipstream.torch.layer_math import typed


class CompactGradients:
    """All layers of a plan that may travel in compact form.

    Args:
        choices: Which of them do so in which step; None: all do, always.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Sequence[CompactLayer],
        channel: LayerChannel,
        choices: LayerChoices | None,
        parameters: Sequence[Tensor],
        finite: FiniteGradients,
    ) -> None:
        self.layers, self.choices = tuple(layers), choices
        self._plan, self._channel, self._parameters = plan, channel, parameters
        self._finite = finite
        self._layer_of = {t: layer for layer in layers for t in layer.tensors}
        self._before: dict[int, tuple[int, int] | None] = {}
        self._left: set[int] = set()  # layers, by unit, that have left in this step

    def begin_step(self, step: int) -> None:
        """This step begins now."""
        if self.choices is not None:
            self.choices.step = step

    def takes(self, layer: CompactLayer) -> bool:
        """Whether this layer's gradient is captured in this step, instead of made dense."""
        return self.choices is None or self.choices.takes(layer.unit)

    def entered(self, layer: CompactLayer, x: Tensor) -> int | None:
        """A layer's forward has begun: send its inputs now, if its gradient will need them.

        Returns:
            The round for which they have left. Where the choice of layers may yet change, or the
            module evaluates (``module.eval()``), they do not.
        """
        if not layer.module.training or not self._channel.takes_early:
            return None
        has_left = self._channel.early_round(layer.unit) is not None
        if not self._codec(layer).early or not layer.once or not len(x) or has_left:
            return None
        if self.choices is not None and not self.choices.is_certain(layer.unit):
            return None
        matrix, loan = self._held(layer, x, 0)
        return self._channel.early(layer.unit, matrix, loan)

    def captured(self, layer: CompactLayer) -> None:
        """One more use of a layer has had its backward."""
        for tensor in layer.tensors:
            self._before.setdefault(tensor, state_of(self._parameters[tensor].grad))

    def finished(self, layer: CompactLayer) -> None:
        """All uses have: it leaves, unless nothing may before the whole backward has ended."""
        if self._plan.schedule.leaves_during_backward:
            self._send(layer)

    def has(self, tensor: int) -> bool:
        """Whether the tensor's gradient was captured; autograd calls its hook all the same.

        Raises:
            RuntimeFault: The weight was also used without calling the layer.
        """
        # Before any gradient leaves: the dense routes must know whom to wait for.
        if self.choices is not None:
            self.choices.decide()
        layer = self._layer_of.get(tensor)
        if layer is None or not self.takes(layer):
            return False
        if state_of(self._parameters[tensor].grad) != self._before.pop(tensor, None):
            raise RuntimeFault(
                f"the weight of {layer.shape.name!r} was also used without calling the layer, so "
                "not all of its gradient was captured; name it in poseidon(dense=[...])"
            )
        return True

    def flush(self) -> None:
        """What has not left yet does; before the channels are flushed."""
        if self.choices is not None:
            self.choices.decide()
        self._before.clear()
        for layer in self.layers:
            if self.takes(layer) and layer.unit not in self._left:
                self._send(layer)
            layer.reset()
        self._left.clear()

    def _send(self, layer: CompactLayer) -> None:
        taken = self._finite_part(layer)
        self._left.add(layer.unit)
        if taken is None:
            self._channel.ready_layer(layer.unit, None)
            return
        early = taken.ahead is not None and taken.ahead == self._channel.early_round(layer.unit)
        first = [] if early else [self._held(layer, taken.first, 0)]
        matrices = [*first, self._held(layer, taken.second, 1)]
        self._channel.ready_layer(layer.unit, matrices, early=early)

    def _held(self, layer: CompactLayer, matrix: Tensor, place: int) -> tuple[Matrix, Loan]:
        """A copy as it travels: whoever made the matrix may write to it before it has left."""
        dtype = self._codec(layer).wire_dtype(dtype_name(matrix), place)
        kind: torch.dtype = getattr(torch, dtype)
        loan = self._channel.buffer(layer.unit, place, matrix.numel() * kind.itemsize)
        typed(loan.data, kind).view(matrix.shape).copy_(matrix)
        return Matrix(len(matrix), loan.data, dtype), loan

    def _codec(self, layer: CompactLayer) -> LayerCodec:
        codec = self._plan.route(self._plan.units[layer.unit]).up
        assert isinstance(codec, LayerCodec)
        return codec

    def _finite_part(self, layer: CompactLayer) -> Captured | None:
        """What the layer has captured, if its gradient counts."""
        taken = layer.take()
        if taken is None:
            return None
        codec = self._codec(layer)
        matrices = (taken.first, taken.second) if layer.shape.form == "factors" else (taken.second,)
        found = [magnitude_of(matrix) for matrix in matrices]
        name = self._plan.specs[layer.weight].name
        for matrix, magnitude in zip(matrices, found, strict=True):
            if not self._finite.admits(name, magnitude, codec.wire_dtype(dtype_name(matrix), 1)):
                return None
        # No entry of the product is above this; only if it might overflow is it worth making.
        most = math.prod(found) * len(taken.first)
        dtype = self._parameters[layer.weight].dtype
        if len(found) > 1 and all(map(math.isfinite, found)) and most > torch.finfo(dtype).max:
            product = taken.second.to(dtype).t() @ taken.first.to(dtype)
            if not self._finite.admits(name, magnitude_of(product)):
                return None
        return taken


def state_of(gradient: Tensor | None) -> tuple[int, int] | None:
    """Changes when somebody writes to a gradient."""
    return None if gradient is None else (id(gradient), gradient._version)
