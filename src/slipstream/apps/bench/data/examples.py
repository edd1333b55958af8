"""Examples for batches: tensors, or sparse rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

Batch = tuple[Any, Tensor]  # the model's argument, and the targets


class Examples(Protocol):
    """Anything that can be indexed in batches."""

    def __len__(self) -> int: ...

    def take(self, indices: Tensor) -> Batch: ...


@dataclass(frozen=True, slots=True)
class TensorExamples:
    """A row of ``inputs`` and a target each; bytes become numbers from 0 to 1 when taken."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Tensor) -> Batch:
        inputs = self.inputs[indices]
        if inputs.dtype == torch.uint8:
            inputs = inputs.float().div_(255)
        return inputs, self.targets[indices]


class SparseBatch(NamedTuple):
    """Rows one after the other: row i is ``indices[offsets[i] : offsets[i + 1]]``."""

    indices: Tensor
    values: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True)
class SparseExamples:
    """Rows of few entries out of ``features``; ``offsets`` has one more entry than rows."""

    indices: Tensor
    values: Tensor
    offsets: Tensor
    targets: Tensor
    features: int

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Tensor) -> Batch:
        starts = self.offsets[indices]
        lengths = self.offsets[indices + 1] - starts
        offsets = torch.cumsum(lengths, 0) - lengths
        # Entry e of row i is at starts[i] + e; all rows at once.
        within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(offsets, lengths)
        entries = torch.repeat_interleave(starts, lengths) + within
        batch = SparseBatch(self.indices[entries], self.values[entries], offsets)
        return batch, self.targets[indices]

    def part(self, rows: Tensor) -> SparseExamples:
        """Return some of the rows."""
        (indices, values, offsets), targets = self.take(rows)
        ends = torch.cat([offsets, torch.tensor([len(indices)])])
        return SparseExamples(indices, values, ends, targets, self.features)


E = TypeVar("E", bound=Examples)


@dataclass(frozen=True, slots=True)
class Split(Generic[E]):
    """Training data, test data, and the number of outputs of a model."""

    train: E
    test: E
    classes: int
    origin: str


def split_off(count: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return indices in random order: for training, and the last ``share`` of them for a test."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    num_train = count - max(1, round(count * share))
    return order[:num_train], order[num_train:]
