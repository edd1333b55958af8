"""The tensors of a model: those that are exchanged, and the whole state that is copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from slipstream.errors import ForeignParameters, RuntimeFault
from slipstream.torch.tensors.compact_layers import is_transposed, named_forms
from slipstream.types import ITEM_BYTES, Spec

Place = tuple[nn.Module, str]


@dataclass(frozen=True, slots=True)
class Inventory:
    """Trainable parameters and floating-point buffers in forward order, with their specs.

    ``tensors[i]`` belongs to ``specs[i]``. A tied weight appears once. Modules may replace a
    buffer by another tensor, so ``places`` has the module and name under which to find it.
    """

    specs: tuple[Spec, ...]
    tensors: tuple[torch.Tensor, ...]
    places: tuple[Place | None, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Inventory:
        """All exchanged tensors of a model."""
        # A tied parameter is part of several layers, and has an obstacle in each.
        layers: dict[int, dict[str, Any]] = {
            id(parameter): {"obstacle": obstacle}
            if obstacle
            else {"layer": name, "form": form, "transposed": is_transposed(module)}
            for name, module, form, obstacle in named_forms(model)
            for parameter in module.parameters(recurse=False)
        }
        specs: list[Spec] = []
        tensors: list[torch.Tensor] = []
        places: list[Place | None] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                spec = spec_of(name, parameter, len(specs), "parameter")
                specs.append(replace(spec, **layers.get(id(parameter), {})))
                tensors.append(parameter)
                places.append(None)
        for name, buffer in model.named_buffers():
            if dtype_name(buffer) in ITEM_BYTES:
                specs.append(spec_of(name, buffer, len(specs), "buffer"))
                tensors.append(buffer)
                places.append(place_of(model, name))
        return cls(tuple(specs), tuple(tensors), tuple(places))

    @property
    def parameters(self) -> list[int]:
        """The numbers of the tensors that are parameters."""
        return [i for i, spec in enumerate(self.specs) if spec.role == "parameter"]

    @property
    def parameter_names(self) -> list[str]:
        return [self.specs[i].name for i in self.parameters]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters, by name."""
        found = ((self.specs[i].name, self.tensors[i]) for i in self.parameters)
        return {name: tensor for name, tensor in found if isinstance(tensor, nn.Parameter)}

    def of_optimizer(
        self, optimizer: torch.optim.Optimizer, without: Collection[int] = ()
    ) -> Inventory:
        """The parameters that an optimizer holds, and buffers; the order does not change.

        Args:
            without: Identities of buffers that are left out.
        """
        groups = groups_of(optimizer)
        kept = [
            i
            for i, (spec, tensor) in enumerate(zip(self.specs, self.tensors, strict=True))
            if (id(tensor) not in without if spec.role == "buffer" else id(tensor) in groups)
        ]
        return self.only(kept)

    def only(self, keep: Iterable[int]) -> Inventory:
        """The tensors with these numbers; the order does not change."""
        kept = sorted(keep)
        return Inventory(
            tuple(self.specs[i] for i in kept),
            tuple(self.tensors[i] for i in kept),
            tuple(self.places[i] for i in kept),
        )


def place_of(model: nn.Module, buffer: str) -> Place:
    owner, _, attribute = buffer.rpartition(".")
    return model.get_submodule(owner), attribute


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype on the wire: a complex number is sent as two real ones."""
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    return dtype_text(dtype)


def dtype_text(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def spec_of(
    name: str, tensor: torch.Tensor, order: int, role: Literal["parameter", "buffer"]
) -> Spec:
    shape = (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)
    return Spec(name, shape, dtype_name(tensor), order, role)


def whole_state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, also frozen and integer ones, each once."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor.detach()) for name, tensor in named]


def floating_state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter and buffer with floating-point values, which can be averaged."""
    return [
        (name, torch.view_as_real(tensor) if tensor.is_complex() else tensor)
        for name, tensor in whole_state(model)
        if tensor.is_floating_point() or tensor.is_complex()
    ]


def whole_vector(model: nn.Module) -> torch.Tensor:
    """All of it as one vector, in fp32."""
    parts = [tensor.float().reshape(-1).cpu() for _, tensor in floating_state(model)]
    return torch.cat(parts)


def is_constant(model: nn.Module) -> Callable[[torch.Tensor], bool]:
    """Whether only updates change a parameter: tables with ``max_norm`` also change in forward
    passes."""
    tables = (m.weight for m in model.modules() if getattr(m, "max_norm", None))
    renormed = {id(table) for table in tables}
    return lambda parameter: id(parameter) not in renormed


def groups_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """By parameter identity: the number of its group."""
    return {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def as_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """A group's settings as text, for comparisons between ranks."""
    return {
        key: f"{float(value) if isinstance(value, torch.Tensor) else value!r}"
        for key, value in sorted(settings.items())
    }


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every parameter the optimizer holds must be the model's.

    Raises:
        ForeignParameters: One is not.
    """
    known = {id(parameter) for parameter in model.parameters()}
    foreign = [
        f"group {g}, parameter {p} of shape {tuple(parameter.shape)}"
        for g, group in enumerate(optimizer.param_groups)
        for p, parameter in enumerate(group["params"])
        if id(parameter) not in known
    ]
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ForeignParameters(
            f"the optimizer holds a parameter that is not in the model ({foreign[0]}{more}): "
            "build the optimizer from model.parameters() of the model you distribute"
        )


def unexpected_gradient(parameter: torch.Tensor) -> RuntimeFault:
    """The error for a parameter that gets a gradient but is not exchanged."""
    return RuntimeFault(
        f"a parameter of shape {tuple(parameter.shape)} has a gradient but took no part in "
        "job.distribute (frozen or unknown then): unfreeze parameters before job.distribute and "
        "freeze them afterwards"
    )


def unheld_gradient(name: str) -> RuntimeFault:
    """The error for a parameter with a gradient whose changes no other worker would get."""
    return RuntimeFault(
        f"the parameter {name!r} has a gradient, but no optimizer that job.distribute was given "
        "holds it, so no other worker would get its changes: put it into one of these optimizers, "
        "or freeze it with requires_grad_(False)"
    )


def config_fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """One line for each item that must be equal on all ranks."""
    lines = [
        f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name!r}: "
        f"{tuple(tensor.shape)} {dtype_text(tensor.dtype)}"
        f"{'' if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ' frozen'}"
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    kind = type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        settings = ", ".join(
            f"{key}={value}" for key, value in as_texts(group_settings(group)).items()
        )
        lines.append(f"{kind} group {index}: {len(group['params'])} parameters, {settings}")
    return lines


def placed(value: Any, parameter: torch.Tensor) -> Any:
    """Move state of the parameter's shape to the parameter's device; counters stay."""
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return value.to(parameter.device)
    return value
