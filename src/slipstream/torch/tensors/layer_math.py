"""Computes a layer's dense mean gradient from all workers' rows, directly into place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.torch.tensors.slots import GradientPlaces, OwnGradients
from slipstream.types import Layer, Values


class TorchLayerMath:
    """Implements ``LayerMath``. Reuses the memory of a gradient, unless the user still holds it.

    Args:
        parameters: By tensor number.
        modules: By layer name; an emulated device's module takes the time of the product.
        results: By tensor number: where to write the gradient, or to add it if there is one. By
            default the parameters' own ``.grad``.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        modules: Mapping[str, Any],
        results: GradientPlaces | None = None,
    ) -> None:
        self._parameters, self._modules = parameters, modules
        self._results = OwnGradients(parameters) if results is None else results
        self._memories: dict[int, Tensor] = {}

    @torch.no_grad()
    def multiply(self, layer: Layer, dy: Values, x: Values, rows: int, share: float) -> None:
        if self._emulated(layer, rows):
            return
        weight = self._parameters[layer.weight]
        given = matrix(dy, rows, layer.outputs)
        # One parameter of the layer may have been frozen since the start, and the other not.
        if weight.requires_grad:
            factors = given, matrix(x, rows, layer.inputs)
            first, second = reversed(factors) if layer.transposed else factors
            self._multiply(layer.weight, first, second, share)
        if layer.bias is not None and (bias := self._parameters[layer.bias]).requires_grad:
            total = given.sum(0, dtype=torch.promote_types(given.dtype, torch.float32))
            self._add(layer.bias, (total * share).to(bias.device, bias.dtype))

    @torch.no_grad()
    def add_rows(self, layer: Layer, ids: Values, values: Values, rows: int, share: float) -> None:
        if self._emulated(layer, rows):
            return
        out = self._results[layer.weight]
        if out is None:
            out = self._placed(layer.weight, self._memory(layer.weight).detach().zero_())
        elif out.is_sparse:
            out = self._placed(layer.weight, out.to_dense())
        where = typed(ids.data, torch.int64)
        given = matrix(values, rows, layer.inputs)
        out.index_add_(0, where.to(out.device), given.to(out.device), alpha=share)

    def _emulated(self, layer: Layer, rows: int) -> bool:
        module: Any = self._modules.get(layer.name)
        if not hasattr(module, "rebuild"):
            return False
        module.rebuild(rows)
        return True

    def _memory(self, tensor: int) -> Tensor:
        """The last gradient's memory, unless it is still held; its content is undefined."""
        weight, held = self._parameters[tensor], self._memories.get(tensor)
        if held is None or held.shape != weight.shape or is_shared(held):
            held = self._memories[tensor] = torch.empty_like(weight, requires_grad=False)
        return held

    def _multiply(self, tensor: int, first: Tensor, second: Tensor, share: float) -> None:
        """firstᵀ·second. Divide while summing: short formats are then rounded once."""
        out = self._results[tensor]
        fresh = out is None
        if out is None:
            out = self._placed(tensor, self._memory(tensor).detach())
        factors = first.t().to(out.device), second.to(out.device)
        torch.addmm(out, *factors, beta=0 if fresh else 1, alpha=share, out=out)

    def _placed(self, tensor: int, gradient: Tensor) -> Tensor:
        """The gradient where it is put, which may be memory that others look at."""
        self._results[tensor] = gradient
        placed = self._results[tensor]
        assert placed is not None
        return placed

    def _add(self, tensor: int, values: Tensor) -> None:
        out = self._results[tensor]
        if out is None:
            self._results[tensor] = values
        else:
            out += values


def matrix(values: Values, rows: int, columns: int) -> Tensor:
    """The stacked rows as a tensor, without a copy."""
    return typed(values.data, getattr(torch, values.dtype)).view(rows, columns)


def typed(memory: np.ndarray[Any, np.dtype[np.uint8]], dtype: torch.dtype) -> Tensor:
    """Raw memory as numbers; torch cannot view empty memory as another type."""
    return torch.from_numpy(memory).view(dtype) if memory.size else torch.empty(0, dtype=dtype)


def is_shared(memory: Tensor) -> bool:
    """Whether another tensor shares its memory: a gradient that the user kept."""
    storage = memory.untyped_storage()
    # The storage is held by this handle and by the tensor itself.
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)
