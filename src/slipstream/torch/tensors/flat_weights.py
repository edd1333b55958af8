"""A model's trained parameters as one vector, to which two threads add."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from slipstream.codecs.residual import Floats
from slipstream.torch.tensors.inventory import Inventory
from slipstream.torch.tensors.staging import as_real
from slipstream.torch.tensors.written_weights import WrittenWeights


class FlatWeights:
    """A writer of weights holds the lock, so that no change is lost. A reader does not, and may see
    some weights that are older than others.

    The vector has the values in the order of rows, whatever the layout in memory.

    What peers add before this worker's first step waits for it, since the loop may load weights
    until then.

    Args:
        constant: Whether only updates change a parameter.

    Attributes:
        written: Notices weights that the loop writes itself.
    """

    def __init__(
        self, inventory: Inventory, constant: Callable[[Tensor], bool] = lambda _: True
    ) -> None:
        named = [
            (spec.name, tensor)
            for spec, tensor in zip(inventory.specs, inventory.tensors, strict=True)
            if spec.role == "parameter"
        ]
        self._parameters = [tensor for _, tensor in named]
        self._starts = [0, *accumulate(live(p).numel() for p in self._parameters)]
        self._apart: list[Tensor] | None = None  # while the model has other weights
        self._begun = False
        self._early: Floats | None = None  # what peers have added before the first step
        self._lock = threading.Lock()
        self.written = WrittenWeights([name for name, _ in named], self._parameters, constant)

    def still(self) -> AbstractContextManager[object]:
        """Within, no other thread changes the weights."""
        return self._lock

    @property
    def numel(self) -> int:
        return self._starts[-1]

    @contextmanager
    def keeping_apart(self) -> Iterator[None]:
        """Within, the weights are those that the model has now, whichever it is given."""
        with self._lock:
            before = self._apart
            if before is None:
                self.written.look_at_all()
                self._apart = [parameter.data for parameter in self._parameters]
        try:
            yield
        finally:
            with self._lock:
                self._apart = before
                if before is None:
                    self.written.note_all_again()

    def look(self) -> None:
        """The job itself is about to write weights, or ends: has the loop written some?"""
        with self._lock:
            self.written.look_at_all()

    def note(self) -> None:
        """The job itself has written weights."""
        with self._lock:
            self.written.note_all_again()

    def _live(self, at: int) -> Tensor:
        return live(self._parameters[at] if self._apart is None else self._apart[at])

    def _all(self) -> list[Tensor]:
        return [self._live(at) for at in range(len(self._parameters))]

    def add(self, start: int, values: Floats) -> None:
        """Add to the weights from ``start`` on; from another thread, during forward and
        backward."""
        with self._lock:
            if self._begun:
                self._add(start, values)
                return
            if self._early is None:
                self._early = np.zeros(self.numel, np.float32)
            self._early[start : start + len(values)] += values

    def _add(self, start: int, values: Floats) -> None:
        stop = start + len(values)
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            weights, first = self._live(at), self._starts[at]
            upto = min(stop, first + weights.numel())
            if self._apart is None:
                self.written.look(at, start - first, upto - first)
            add_to(weights, start - first, values[: upto - start])
            if self._apart is None:
                self.written.note(at, start - first, upto - first)
            values, start, at = values[upto - start :], upto, at + 1

    def begin(self) -> None:
        """The loop loads no more weights: peers add to those that there are."""
        with self._lock:
            self._begin()

    def _begin(self) -> None:
        early, self._early, self._begun = self._early, None, True
        if early is not None:
            self._add(0, early)

    def stepped(self, step: Callable[[], object], coefficient: float) -> Floats:
        """Run ``step`` and scale its change of the weights by the coefficient; return that
        change."""
        update = torch.empty(self.numel, dtype=torch.float32)
        with self._lock, torch.no_grad():
            self._begin()
            self.written.look_at_all()
            before = [weights.clone() for weights in self._all()]
            step()
            for weights, old, part in zip(self._all(), before, self._parts(update), strict=True):
                change = part.view(weights.shape)
                change.copy_(torch.sub(weights, old, out=weights)).mul_(coefficient)
                torch.add(old, change.to(weights.device, weights.dtype), out=weights)
            self.written.note_all()
        changed: Floats = update.numpy()
        return changed

    def whole(self) -> Floats:
        """A copy of the current weights."""
        vector = torch.empty(self.numel, dtype=torch.float32)
        with self._lock:
            self._begin()
            for weights, part in zip(self._all(), self._parts(vector), strict=True):
                part.view(weights.shape).copy_(weights)
        found: Floats = vector.numpy()
        return found

    def clear(self) -> None:
        """Set all weights to zero; received weights are then added."""
        with self._lock:
            self._begun, self._early = True, None
            for weights in self._all():
                weights.zero_()

    def _parts(self, vector: Tensor) -> list[Tensor]:
        return [vector[start:stop] for start, stop in pairwise(self._starts)]


def live(weights: Tensor) -> Tensor:
    """Real, and hidden from autograd: a running pass may read older weights."""
    return as_real(weights.data)


def add_to(weights: Tensor, start: int, values: Floats) -> None:
    """Add to weights from ``start`` on."""
    flat = weights.reshape(-1)  # a copy, if rows are not one after the other in memory
    part = flat[start : start + len(values)]
    if part.device.type == "cpu" and part.dtype == torch.float32:
        memory = part.numpy()
        np.add(memory, values, out=memory)
    else:
        part.add_(torch.from_numpy(values.copy()).to(part.device, part.dtype))
    if flat.data_ptr() != weights.data_ptr():
        weights.copy_(flat.view(weights.shape))
