"""What a model holds: the tensors that are exchanged, and the whole state that is copied."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from slipstream.errors import ForeignParameters, RuntimeFault
from slipstream.torch.compact_layers import named_forms
from slipstream.types import ITEM_BYTES, Spec

Place = tuple[nn.Module, str]


@dataclass(frozen=True, slots=True)
class Inventory:
    """Trainable parameters and floating-point buffers in forward order, with their specs.

    ``tensors[i]`` belongs to ``specs[i]``. A tied weight appears once. Modules may put another
    tensor into a buffer's place, so ``places`` tells where to look for it.
    """

    specs: tuple[Spec, ...]
    tensors: tuple[torch.Tensor, ...]
    places: tuple[Place | None, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Inventory:
        layers, obstacles = compact_parts(model)
        specs: list[Spec] = []
        tensors: list[torch.Tensor] = []
        places: list[Place | None] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                spec = spec_of(name, parameter, len(specs), "parameter")
                layer, obstacle = layers.get(id(parameter), ""), obstacles.get(id(parameter), "")
                specs.append(replace(spec, layer=layer, obstacle=obstacle))
                tensors.append(parameter)
                places.append(None)
        for name, buffer in model.named_buffers():
            if dtype_name(buffer) in ITEM_BYTES:
                specs.append(spec_of(name, buffer, len(specs), "buffer"))
                tensors.append(buffer)
                places.append(place_of(model, name))
        return cls(tuple(specs), tuple(tensors), tuple(places))

    def only(self, keep: set[int]) -> Inventory:
        """Without the tensors whose index is not in ``keep``; orders stay."""
        return Inventory(
            tuple(spec for i, spec in enumerate(self.specs) if i in keep),
            tuple(tensor for i, tensor in enumerate(self.tensors) if i in keep),
            tuple(place for i, place in enumerate(self.places) if i in keep),
        )


def place_of(model: nn.Module, buffer: str) -> Place:
    owner, _, attribute = buffer.rpartition(".")
    return model.get_submodule(owner), attribute


def compact_parts(model: nn.Module) -> tuple[dict[int, str], dict[int, str]]:
    """By parameter: the layer it is part of, if that one's gradient has a compact form; and why
    not, if it might have had one."""
    layers: dict[int, str] = {}
    obstacles: dict[int, str] = {}
    for name, module, _, obstacle in named_forms(model):
        for parameter in module.parameters(recurse=False):
            if obstacle:
                obstacles[id(parameter)] = obstacle
            else:
                layers[id(parameter)] = name
    return layers, obstacles


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype that travels: a complex number travels as two real ones."""
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    return str(dtype).removeprefix("torch.")


def spec_of(name: str, tensor: torch.Tensor, order: int, role: str) -> Spec:
    shape = (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)
    return Spec(
        name, shape, dtype_name(tensor), order, "parameter" if role == "parameter" else "buffer"
    )


def whole_state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, frozen and integer ones too, each once."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor.detach()) for name, tensor in named]


def floating_state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter and buffer that a mean makes sense of."""
    return [
        (name, torch.view_as_real(tensor) if tensor.is_complex() else tensor)
        for name, tensor in whole_state(model)
        if tensor.is_floating_point() or tensor.is_complex()
    ]


def whole_vector(model: nn.Module) -> torch.Tensor:
    """All of it one after the other, in fp32."""
    parts = [tensor.float().reshape(-1).cpu() for _, tensor in floating_state(model)]
    return torch.cat(parts)


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every parameter the optimizer holds must be the model's."""
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
    return RuntimeFault(
        f"a parameter of shape {tuple(parameter.shape)} has a gradient but took no part in "
        "job.distribute (frozen or unknown then): unfreeze parameters before job.distribute and "
        "freeze them afterwards"
    )


def portrait(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """One line for each thing that must be equal on all ranks."""
    lines = [
        f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name!r}: "
        f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        f"{'' if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ' frozen'}"
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    kind = type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        settings = ", ".join(
            f"{key}={float(value) if isinstance(value, torch.Tensor) else value!r}"
            for key, value in sorted(group.items())
            if key != "params"
        )
        lines.append(f"{kind} group {index}: {len(group['params'])} parameters, {settings}")
    return lines
