"""A model whose tensors are views of shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.planning.segment import (
    FROZEN,
    RULES,
    SET,
    SegmentPlan,
    SharedTensor,
    settings_vector,
)
from slipstream.runtime.files.checkpoint_format import SHORT
from slipstream.torch.optimizers.shard_optimizer import is_elementwise
from slipstream.torch.tensors.compact_layers import named_forms
from slipstream.torch.tensors.inventory import (
    dtype_text,
    group_settings,
    groups_of,
    place_of,
    whole_state,
)
from slipstream.transports.shared_memory import SharedMemory

TRAINED = ("float32", "float64")


def check_shareable(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what the native update of shared weights does not support.

    Raises:
        ConfigError: This optimizer, or a tensor's dtype, cannot be shared.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ not in RULES:
        other = "async_sgd()" if is_elementwise(kind) else "push_pull(), which takes any optimizer"
        raise ConfigError(
            f"gadei updates shared weights with {', '.join(RULES)}, not {kind.__name__}: use one "
            f"of these, or {other}"
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ConfigError("gadei has no amsgrad=True: use Adam without it, or async_sgd")
    for name, tensor in whole_state(model):
        if (dtype := dtype_text(tensor.dtype)) not in SHORT:
            raise ConfigError(
                f"{name!r} is {dtype}, which gadei's checkpoints cannot keep: make it two real "
                "tensors, or use async_sgd"
            )
    trained = groups_of(optimizer)
    for name, parameter in model.named_parameters():
        dtype = dtype_text(parameter.dtype)
        if id(parameter) in trained and parameter.requires_grad and dtype not in TRAINED:
            raise ConfigError(
                f"{name!r} is {dtype}; gadei trains weights in {' or '.join(TRAINED)}: keep them "
                "so and compute under torch.autocast"
            )


def shared_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[SharedTensor]:
    """All tensors of the model, in its order; embeddings with sparse gradients are marked."""
    group_of = groups_of(optimizer)
    in_rows = {
        id(module.weight)
        for _, module, form, obstacle in named_forms(model)
        if form == "rows" and not obstacle
    }
    parameters = dict(model.named_parameters())
    tensors = []
    for name, tensor in whole_state(model):
        own = parameters.get(name)
        trained = own is not None and own.requires_grad
        tensors.append(
            SharedTensor(
                name,
                tuple(tensor.shape),
                dtype_text(tensor.dtype),
                tensor.element_size(),
                group_of.get(id(own), FROZEN) if trained else FROZEN,
                trained and id(own) in in_rows,
            )
        )
    return tensors


def settings_of(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """Settings by group, in the format of the native update."""
    kind = type(optimizer).__name__
    return [settings_vector(kind, group_settings(group)) for group in optimizer.param_groups]


class Settings:
    """The same as one flat list, recomputed when they have changed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._seen: list[list[object]] = []
        self._numbers: list[float] = []

    def __call__(self) -> list[float]:
        values = [list(map(group.get, SET)) for group in self._optimizer.param_groups]
        if values != self._seen:
            self._numbers = list(chain(*settings_of(self._optimizer)))
            # A tensor or a list may change in place and still be the same object.
            steady = all(is_steady(value) for each in values for value in each)
            self._seen = values if steady else []
        return self._numbers


def is_steady(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(is_steady, value))
    return value is None or isinstance(value, int | float)


class SharedWeights:
    """The model's own tensors, and their counterparts in shared memory.

    On the CPU the model's may be views of the shared ones (``bind``); else they are copied. Tensors
    without floating-point numbers (counters) are also copied, and so are tensors with which a
    module replaces a buffer.
    """

    def __init__(self, model: nn.Module, plan: SegmentPlan, memory: SharedMemory, at: int) -> None:
        self._parameters = list(model.parameters())
        self._names = [tensor.name for tensor in plan.tensors]
        self._places = [place_of(model, name) for name, _ in model.named_buffers()]
        self.views = [
            view_of(memory, at + offset, tensor.shape, getattr(torch, tensor.dtype))
            for tensor, offset in zip(plan.tensors, plan.weights_at, strict=True)
        ]
        self._trained = [gradient.tensor for gradient in plan.gradients]

    @property
    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Shared tensors, and the model's current counterparts."""
        return [*zip(self.views, self._parameters, strict=False), *self.buffers()]

    @property
    def on_host(self) -> bool:
        return all(tensor.device.type == "cpu" for _, tensor in self._pairs)

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the model's tensors to shared memory."""
        for view, tensor in self._pairs:
            view.copy_(tensor)

    @torch.no_grad()
    def copy_in(self) -> None:
        """Copy shared memory to the model's tensors."""
        for view, tensor in self._pairs:
            tensor.copy_(view)

    # ---- the model uses the shared tensors

    @torch.no_grad()
    def bind(self) -> None:
        """Make the model's floating-point tensors views of the shared ones."""
        for view, tensor in self._pairs:
            if tensor.is_floating_point():
                tensor.data = view
        self.copy_in_unbound()

    def bound(self) -> tuple[list[str], list[torch.Tensor], list[torch.Tensor]]:
        """The names of floating-point parameters, themselves, and the shared ones."""
        named = zip(self._names, self._parameters, self.views, strict=False)
        found = [each for each in named if each[1].is_floating_point()]
        return [n for n, _, _ in found], [p for _, p, _ in found], [v for _, _, v in found]

    @torch.no_grad()
    def copy_in_unbound(self) -> None:
        for view, tensor in self._pairs:
            if tensor.data_ptr() != view.data_ptr():
                tensor.copy_(view)

    @torch.no_grad()
    def copy_out_buffers(self) -> None:
        """Copy buffers that are not bound to shared memory; the last writer wins."""
        for view, tensor in self.buffers():
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)

    @torch.no_grad()
    def unbind(self) -> None:
        """Give the model its own copy of its tensors."""
        for view, tensor in self._pairs:
            if tensor.data_ptr() == view.data_ptr():
                tensor.data = view.clone()

    # ---- the model has its own tensors

    def trained(self) -> list[torch.Tensor]:
        """The shared tensors that are trained, in the order of the slots' gradients."""
        return [self.views[i] for i in self._trained]

    def buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Shared buffers, and the tensors that are in their places now, without those to which a
        module has given another shape."""
        found = []
        for view, (module, name) in zip(
            self.views[len(self._parameters) :], self._places, strict=True
        ):
            own = getattr(module, name)
            if isinstance(own, torch.Tensor) and own.shape == view.shape:
                found.append((view, own))
        return found

    def own_tensors(self) -> list[torch.Tensor]:
        """The tensors that trained parameters use now."""
        return [self._parameters[i].data for i in self._trained]

    def spare_tensors(self) -> list[torch.Tensor]:
        """A second set of such tensors."""
        return [torch.empty_like(tensor) for tensor in self.own_tensors()]

    def point_at(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let trained parameters use these tensors from now on."""
        for i, tensor in zip(self._trained, tensors, strict=True):
            self._parameters[i].data = tensor


def view_of(
    memory: SharedMemory, at: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor that is a view of shared memory."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory.memory, dtype=dtype, count=count, offset=at).view(tuple(shape))
