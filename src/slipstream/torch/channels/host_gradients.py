"""A host's gradients as torch tensors: what collectives between hosts sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.runtime.hosts.leader import HostSlots
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.torch.tensors.slots import GradientPlaces
from slipstream.torch.tensors.staging import as_real
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
            target.copy_(as_real(gradient).reshape(target.shape))


@dataclass(frozen=True, slots=True)
class HostExchange:
    """Sums of a host, which another host's are added to; implements ``ExchangedGradients``."""

    gradients: HostGradients
    finite: FiniteGradients

    @property
    def contributions(self) -> HostGradients:
        return self.gradients

    @property
    def results(self) -> HostGradients:
        return self.gradients


class LayerResults:
    """Adds gradients that came out of shared memory to a worker's own, as torch does."""

    def __init__(self, specs: Sequence[Spec], parameters: Sequence[Tensor], own: GradientPlaces):
        self._specs, self._parameters, self._own = specs, parameters, own

    @torch.no_grad()
    def add(self, tensor: int, values: Values) -> None:
        """Copy or add; the memory is others' to write again."""
        given = viewed(values, self._specs[tensor]).to(self._parameters[tensor].device)
        before = self._own[tensor]
        if before is None:
            self._own[tensor] = given.clone()
        else:
            before += given


def viewed(values: Values, spec: Spec) -> Tensor:
    """The same memory as a tensor."""
    return torch.from_numpy(values.data).view(getattr(torch, spec.dtype)).view(spec.shape)
