"""Layers' gradients in compact form: from their capture in autograd to the channel.

A layer's matrices are sent as soon as its backward has ended. Half of a fully connected layer's,
its inputs, are known in the forward pass: if the layer was called exactly once in the step before,
they are sent at once; its backward then confirms them or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.codecs import LayerCodec
from slipstream.codecs.matrices import Matrix, matrix_nbytes, quantize
from slipstream.codecs.quantized import FEW_BITS
from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.runtime.exchange.channel import LayerChannel
from slipstream.runtime.exchange.choices import LayerChoices
from slipstream.runtime.exchange.send_buffers import Loan
from slipstream.torch.capture.assigned_gradients import AssignedGradients
from slipstream.torch.tensors.compact_layers import Captured, CompactLayer, stacked
from slipstream.torch.tensors.finite_gradients import FiniteGradients, magnitude_of
from slipstream.torch.tensors.inventory import dtype_name
from slipstream.torch.tensors.layer_math import typed


class CompactGradients:
    """All layers of a plan that may be sent in compact form.

    Args:
        choices: Which of them are; None: all, always.
        assigned: Gradients that the loop computes in other ways than ``backward()``.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Sequence[CompactLayer],
        channel: LayerChannel,
        choices: LayerChoices | None,
        parameters: Sequence[Tensor],
        finite: FiniteGradients,
        assigned: AssignedGradients,
    ) -> None:
        self.layers, self.choices = tuple(layers), choices
        self._plan, self._channel, self._parameters = plan, channel, parameters
        self._finite, self._assigned = finite, assigned
        self._layer_of = {t: layer for layer in layers for t in layer.tensors}
        self._before: dict[int, tuple[int, int] | None] = {}
        self._left: set[int] = set()  # layers, by unit, that were sent in this step
        self._awaits_results = False

    def begin_step(self) -> None:
        """The next step begins."""
        if self.choices is not None:
            self.choices.begin_step()

    def takes(self, layer: CompactLayer) -> bool:
        """Whether this layer's gradient is captured in this step, instead of computed dense."""
        return self.choices is None or self.choices.takes(layer.unit)

    def may_take(self, layer: CompactLayer) -> bool:
        """Whether a forward that begins now has to keep what the compact form needs."""
        return self.choices is None or self.choices.is_compact(layer.unit) is not False

    def entered(self, layer: CompactLayer, x: Tensor) -> int | None:
        """A layer's forward has begun: send its inputs now, if its gradient will need them.

        Returns:
            The round for which they were sent. None if the layers are not chosen yet, or the
            module evaluates (``module.eval()``).
        """
        if not layer.module.training or not self._channel.takes_early:
            return None
        has_left = self._channel.early_round(layer.unit) is not None
        if not self._codec(layer).early or not layer.once or not len(x) or has_left:
            return None
        if self.choices is not None and not self.choices.is_compact(layer.unit):
            return None
        matrix, loan = self._held(layer, x, 0)
        return self._channel.early(layer.unit, matrix, loan)

    def captured(self, layer: CompactLayer) -> None:
        """The backward of one more use of a layer has run."""
        for tensor in layer.tensors:
            self._before.setdefault(tensor, state_of(self._parameters[tensor].grad))

    def finished(self, layer: CompactLayer) -> None:
        """All uses are done: send the layer, unless the schedule waits for the end of backward."""
        if self._plan.schedule.leaves_during_backward:
            self._send(layer)

    def has(self, tensor: int) -> bool:
        """Whether the tensor's layer is sent in compact form; autograd calls its hook in any case.

        Raises:
            RuntimeFault: Autograd has added to its gradient after the layer was sent.
        """
        # Decide before any gradient is sent: the dense routes must know which layers to wait for.
        if self.choices is not None:
            self.choices.decide()
        layer = self._layer_of.get(tensor)
        if layer is None or not self.takes(layer):
            return False
        unchanged = state_of(self._parameters[tensor].grad) == self._before.pop(tensor, None)
        if layer.unit in self._left and not unchanged:
            raise RuntimeFault(
                f"the weight of {layer.shape.name!r} was also used without calling the layer, so "
                "not all of its gradient was captured; name it in poseidon(dense=[...])"
            )
        return True

    def flush(self) -> None:
        """Send what has not been sent yet; called before the channels are flushed."""
        if self.choices is not None:
            self.choices.decide()
        self._before.clear()
        for layer in self.layers:
            if self.takes(layer) and layer.unit not in self._left:
                self._send(layer)
        if self.choices is not None:
            self.choices.end_exchange()
        for layer in self.layers:
            layer.reset()
        self._left.clear()
        self._awaits_results = True

    def delivered(self) -> None:
        """All results that the next step needs have arrived."""
        if self._awaits_results:
            self._awaits_results = False
            self._assigned.delivered(self.layers)

    def _send(self, layer: CompactLayer) -> None:
        taken = self._finite_part(layer, self._contribution(layer))
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
        codec, channel = self._codec(layer), self._channel
        dtype = dtype_name(matrix)
        if channel.takes_encoded:
            dtype = codec.wire_dtype(dtype, place)
        loan = channel.buffer(layer.unit, place, matrix_nbytes(matrix.numel(), dtype))
        if dtype in FEW_BITS:
            values = matrix.detach().to("cpu", torch.float32).contiguous().numpy()
            seed = codec.chance(channel.rank, channel.step, layer.unit, place)
            quantize(loan.data, values.reshape(-1).view(np.uint8), dtype, seed)
        else:
            typed(loan.data, getattr(torch, dtype)).view(matrix.shape).copy_(matrix)
        return Matrix(len(matrix), loan.data, dtype), loan

    def _codec(self, layer: CompactLayer) -> LayerCodec:
        codec = self._plan.route(self._plan.units[layer.unit]).up
        assert isinstance(codec, LayerCodec)
        return codec

    def _contribution(self, layer: CompactLayer) -> Captured | None:
        """What backward has captured, and what the loop itself has put into ``.grad``."""
        captured = layer.take()
        coarse = self._codec(layer).wire in FEW_BITS
        assigned = self._assigned.take(layer, coarse=coarse)
        if assigned is None:
            return captured
        layer.assigned = captured is None
        for tensor in layer.tensors:
            if tensor in self._before:
                self._before[tensor] = state_of(self._parameters[tensor].grad)
        return assigned if captured is None else stacked([captured, assigned])

    def _finite_part(self, layer: CompactLayer, taken: Captured | None) -> Captured | None:
        """A layer's gradient, if it counts."""
        if taken is None:
            return None
        codec = self._codec(layer)
        matrices = (taken.first, taken.second) if layer.shape.form == "factors" else (taken.second,)
        found = [magnitude_of(matrix) for matrix in matrices]
        name = self._plan.specs[layer.weight].name
        for matrix, magnitude in zip(matrices, found, strict=True):
            if not self._finite.admits(name, magnitude, codec.wire_dtype(dtype_name(matrix), 1)):
                return None
        # An upper bound of the product's entries; compute the product only if it might overflow.
        most = math.prod(found) * len(taken.first)
        dtype = self._parameters[layer.weight].dtype
        if len(found) > 1 and all(map(math.isfinite, found)) and most > torch.finfo(dtype).max:
            product = taken.second.to(dtype).t() @ taken.first.to(dtype)
            if not self._finite.admits(name, magnitude_of(product)):
                return None
        return taken


def state_of(gradient: Tensor | None) -> tuple[int, int] | None:
    """A value that changes when a gradient is written to."""
    return None if gradient is None else (id(gradient), gradient._version)
