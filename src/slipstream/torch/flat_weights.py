"""A model's trained parameters as one vector, to which two threads add."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise

import numpy as np
import torch

from slipstream.codecs.residual import Floats
from slipstream.errors import ConfigError
from slipstream.torch.inventory import Inventory
from slipstream.torch.staging import as_real


class FlatWeights:
    """A writer of weights holds the lock, so that no change is lost. A reader does not, and may see
    some weights that are older than others."""

    def __init__(self, inventory: Inventory) -> None:
        named = [
            (spec.name, tensor)
            for spec, tensor in zip(inventory.specs, inventory.tensors, strict=True)
            if spec.role == "parameter"
        ]
        for name, tensor in named:
            if not tensor.is_contiguous():
                raise ConfigError(
                    f"{name!r} is not contiguous, as partial exchange needs it: call "
                    "model.to(memory_format=torch.contiguous_format) before job.distribute"
                )
        self._parameters = [tensor for _, tensor in named]
        self._starts = [0, *accumulate(live(p).numel() for p in self._parameters)]
        self._lock = threading.Lock()

    def still(self) -> AbstractContextManager[object]:
        """Within, no other thread changes the weights."""
        return self._lock

    @property
    def numel(self) -> int:
        return self._starts[-1]

    def add(self, start: int, values: Floats) -> None:
        """Add to the weights from ``start`` on; from another thread, during forward and
        backward."""
        stop = start + len(values)
        with self._lock:
            at = bisect_right(self._starts, start) - 1
            while start < stop:
                flat, first = live(self._parameters[at]), self._starts[at]
                upto = min(stop, first + flat.numel())
                add_to(flat[start - first : upto - first], values[: upto - start])
                values, start, at = values[upto - start :], upto, at + 1

    def stepped(self, step: Callable[[], object], coefficient: float) -> Floats:
        """Run ``step`` and scale its change of the weights by the coefficient; return that
        change."""
        update = torch.empty(self.numel, dtype=torch.float32)
        with self._lock, torch.no_grad():
            before = [live(parameter).clone() for parameter in self._parameters]
            step()
            for parameter, old, part in zip(
                self._parameters, before, self._parts(update), strict=True
            ):
                flat = live(parameter)
                part.copy_(torch.sub(flat, old, out=flat)).mul_(coefficient)
                torch.add(old, part.to(flat.device, flat.dtype), out=flat)
        changed: Floats = update.numpy()
        return changed

    def whole(self) -> Floats:
        """A copy of the current weights."""
        vector = torch.empty(self.numel, dtype=torch.float32)
        with self._lock:
            for parameter, part in zip(self._parameters, self._parts(vector), strict=True):
                part.copy_(live(parameter))
        found: Floats = vector.numpy()
        return found

    def clear(self) -> None:
        """Set all weights to zero; received weights are then added."""
        with self._lock:
            for parameter in self._parameters:
                live(parameter).zero_()

    def _parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        return [vector[start:stop] for start, stop in pairwise(self._starts)]


def live(parameter: torch.Tensor) -> torch.Tensor:
    """Flat, real, and hidden from autograd: a running pass may read older weights."""
    return as_real(parameter.data).view(-1)


def add_to(weights: torch.Tensor, values: Floats) -> None:
    if weights.device.type == "cpu" and weights.dtype == torch.float32:
        memory = weights.numpy()
        np.add(memory, values, out=memory)
    else:
        weights.add_(torch.from_numpy(values.copy()).to(weights.device, weights.dtype))
