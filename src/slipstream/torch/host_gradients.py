"""A host's gradients as torch tensors: what collectives between hosts sum."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.runtime.hosts.leader import HostSlots
from slipstream.types import Spec, Values


class HostGradients:
    """Views of the memory that a host's workers share; implements ``GradientPlaces``."""

    def __init__(self, slots: HostSlots) -> None:
        self._slots, self._specs = slots, slots.memory.specs

    def __getitem__(self, tensor: int) -> Tensor | None:
        values = self._slots.source(tensor)
        return None if values is None else viewed(values, self._specs[tensor])

    def __setitem__(self, tensor: int, gradient: Tensor | None) -> None:
        if gradient is None:
            self._slots.drop(tensor)
        else:
            target = viewed(self._slots.sink(tensor), self._specs[tensor])
            target.copy_(gradient.reshape(target.shape))


def viewed(values: Values, spec: Spec) -> Tensor:
    """The same memory as a tensor."""
    return torch.from_numpy(values.data).view(getattr(torch, spec.dtype)).view(spec.shape)
