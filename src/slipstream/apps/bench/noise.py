"""Cheap contents for tensors whose bytes matter and whose values do not."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK_NUMEL = 1 << 16


class Noise:
    """Memory filled with normal numbers, which repeat: drawing each one would take too long."""

    def __init__(self, seed: int, scale: float) -> None:
        normal = torch.randn(BLOCK_NUMEL, generator=torch.Generator().manual_seed(seed))
        self._block = normal.mul_(scale)

    def make(self, shape: tuple[int, ...]) -> Tensor:
        flat = torch.empty(math.prod(shape))
        whole = len(flat) // BLOCK_NUMEL * BLOCK_NUMEL
        flat[:whole].view(-1, BLOCK_NUMEL).copy_(self._block)
        flat[whole:].copy_(self._block[: len(flat) - whole])
        return flat.view(shape)


class Rows:
    """Rows of activations, or of their gradients, drawn for the largest K so far and reused."""

    def __init__(self, noise: Noise, columns: int) -> None:
        self._noise = noise
        self._columns = columns
        self._memory = torch.empty(0, columns)

    def take(self, rows: int) -> Tensor:
        if rows > len(self._memory):
            self._memory = self._noise.make((rows, self._columns))
        return self._memory[:rows].detach()
