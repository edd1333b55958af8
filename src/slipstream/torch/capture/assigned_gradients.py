"""Gradients that a loop puts into ``.grad`` itself, of layers that are sent in compact form.

``p.grad = torch.autograd.grad(loss, p)`` runs no backward pass in which a layer could be captured.
A matrix G of m × n has an exact compact form, too: G = sI·(G/s), with min(m, n) rows. It takes up
to twice the bytes of the dense gradient, but no agreement of all workers on a round's form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from slipstream.torch.tensors.compact_layers import Captured, CompactLayer


class AssignedGradients:
    """Knows which ``.grad`` is a result of an exchange; any other one is this worker's own.

    Args:
        parameters: By tensor number.
        replaced: Whether a round's result takes the gradient's place, as where workers update.
    """

    def __init__(self, parameters: Sequence[Tensor], *, replaced: bool) -> None:
        self._parameters, self._replaced = parameters, replaced
        self._results: dict[int, tuple[TensorWeakRef, int]] = {}

    def delivered(self, layers: Sequence[CompactLayer]) -> None:
        """Results of an exchange have arrived: what is in ``.grad`` now is known to all workers."""
        if not self._replaced:
            return
        self._results = {
            tensor: (TensorWeakRef(gradient), gradient._version)
            for layer in layers
            for tensor in layer.tensors
            if (gradient := self._parameters[tensor].grad) is not None
        }

    def take(self, layer: CompactLayer, *, coarse: bool) -> Captured | None:
        """Take what the loop has assigned to a layer, in compact form; None if it is nothing.

        Args:
            coarse: Whether blocks of values share a scale on the wire.
        """
        found = [self._own(tensor) for tensor in layer.tensors]
        if all(gradient is None or is_zero(gradient) for gradient in found):
            return None
        if self._replaced:
            for tensor, gradient in zip(layer.tensors, found, strict=True):
                if gradient is not None:
                    self._parameters[tensor].grad = None
        weight = found[0]
        if layer.shape.form == "rows":
            assert weight is not None  # the only one
            return as_rows_of_table(weight.detach())
        if weight is None:
            weight = torch.zeros_like(self._parameters[layer.weight])
        matrix = weight.detach().t() if layer.transposed else weight.detach()
        if layer.bias is None:
            return as_factors(matrix)
        bias = found[1]
        if bias is None:
            bias = torch.zeros_like(self._parameters[layer.bias])
        return as_factors_with_bias(matrix, bias.detach(), coarse=coarse)

    def _own(self, tensor: int) -> Tensor | None:
        """This worker's own gradient; None if there is none."""
        parameter = self._parameters[tensor]
        gradient = parameter.grad
        if gradient is None or not parameter.requires_grad:
            return None
        result, version = self._results.get(tensor, (None, -1))
        is_result = result is not None and result() is gradient and gradient._version == version
        return None if is_result else gradient


def is_zero(gradient: Tensor) -> bool:
    """Whether all values are 0, as after ``zero_grad(set_to_none=False)``."""
    return not bool(gradient.count_nonzero() if not gradient.is_sparse else gradient._nnz())


def as_rows_of_table(gradient: Tensor) -> Captured:
    """Ids and values of a table's rows that are not 0."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return Captured(gradient.indices()[0], gradient.values())
    (ids,) = (gradient != 0).any(1).nonzero(as_tuple=True)
    return Captured(ids, gradient[ids])


def as_factors(gradient: Tensor, scale: float = 1.0) -> Captured:
    """X and dY whose product dYᵀX is an outputs × inputs gradient: the shorter one is diagonal.

    Args:
        scale: A power of two: what dY is multiplied by, and X divided.
    """
    outputs, inputs = gradient.shape
    diagonal = torch.eye(min(outputs, inputs), dtype=gradient.dtype, device=gradient.device)
    if outputs <= inputs:
        return Captured(gradient / scale, diagonal * scale)
    return Captured(diagonal / scale, gradient.t() * scale)


def as_factors_with_bias(gradient: Tensor, bias: Tensor, *, coarse: bool) -> Captured:
    """The same; one more row makes the sum of dY's rows the bias's gradient, and nothing else.

    dY is kept small beside the bias's gradient, so that the sum rounds that as little as a mean
    does; where a scale covers both (``coarse``), it is kept of the same size.
    """
    largest, of_bias = float(gradient.abs().amax()), float(bias.abs().amax())
    of_bias_share, of_largest_share = (1.0, 2.0**-20) if coarse else (2.0**-30, 2.0**-60)
    size = max(of_bias * of_bias_share, largest * of_largest_share)
    size = power_of_two(max(size, 2.0**-100))
    outputs, inputs = gradient.shape
    scale = size if outputs <= inputs else size / power_of_two(max(largest, 2.0**-100) * inputs)
    product = as_factors(gradient, scale)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    rest = bias.to(wide) - product.second.sum(0, dtype=wide)
    return Captured(
        torch.cat([product.first, gradient.new_zeros(1, inputs)]),
        torch.cat([product.second, rest.to(gradient.dtype)[None]]),
    )


def power_of_two(number: float) -> float:
    """The largest one that is not above a number; 1 if that is not finite."""
    return math.ldexp(0.5, math.frexp(number)[1]) if math.isfinite(number) else 1.0
