"""Sums by which tensors are compared: of their bits, so that the order of a sum does not matter."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def sums_of(tensors: Iterable[Tensor | None]) -> list[int]:
    """One sum a tensor; 0 if there is none."""
    return [0 if tensor is None else sum_of(tensor) for tensor in tensors]


def sum_of(tensor: Tensor) -> int:
    """The sum of a tensor's values as integers, modulo their size."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.detach().resolve_neg().view(INTEGERS[tensor.element_size()])
    return int(bits.sum(dtype=bits.dtype))
