"""The sections of a checkpoint's file: one for every pair of a model and an optimizer.

The only section of a job with one pair has plain names, see ``checkpoint_format``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.runtime.files.checkpoint_format import FORMAT, section_name
from slipstream.torch.checkpoints.checkpoint import Checkpoint, model_tensors, pack
from slipstream.torch.checkpoints.kept_state import Held
from slipstream.torch.checkpoints.saved_outer_state import outer_tensors
from slipstream.torch.optimizers.loop_optimizer import kind_of
from slipstream.torch.tensors.inventory import group_settings
from slipstream.torch.tensors.pairs import Pair, first_with


@dataclass(slots=True)
class Section:
    """One pair's section of a file: tensors by name, and the optimizer's state and settings."""

    optimizer: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)  # names of tensors that may become infinite

    @classmethod
    def of(cls, pairs: Sequence[Pair], number: int, held: Held) -> Section:
        """The section; with the model, unless an earlier pair has the same one."""
        model, optimizer = pairs[number]
        section = cls(described(optimizer, held.state))
        if first_with(pairs, number) == number:
            section.tensors = model_tensors(model)
            section.buffers = {f"model/{name}" for name, _ in model.named_buffers()}
        section.tensors |= {f"averaged/{name}": tensor for name, tensor in held.averages.items()}
        section.tensors |= outer_tensors(held.outer)
        section.tensors |= {f"precise/{name}": tensor for name, tensor in held.precise.items()}
        return section


def sections_with(pairs: Sequence[Pair], held: Sequence[Held]) -> list[Section]:
    """The sections of all pairs, with held weights in place of the models' own."""
    sections: list[Section] = []
    weights: dict[int, torch.Tensor] = {}  # by identity: models may share tensors
    for number, (pair, each) in enumerate(zip(pairs, held, strict=True)):
        own = named_tensors(pair.model)
        weights |= {id(own[name]): tensor for name, tensor in each.weights.items()}
        sections.append(Section.of(pairs, number, each))
    for pair, section in zip(pairs, sections, strict=True):
        for name, tensor in named_tensors(pair.model).items():
            if f"model/{name}" in section.tensors and id(tensor) in weights:
                section.tensors[f"model/{name}"] = weights[id(tensor)]
    return sections


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def write(path: Path, sections: Sequence[Section], facts: Mapping[str, Any]) -> None:
    """All sections as one file; ``facts["steps"]`` are by pair."""
    tensors: dict[str, torch.Tensor] = {}
    buffers: set[str] = set()
    packed = []
    for number, section in enumerate(sections):
        # References within a section use names within it.
        packed.append(pack(section.optimizer, "optimizer", section.tensors))
        head = section_name(number, len(sections))
        # Held weights may be on an accelerator, or laid out as convolutions prefer.
        tensors |= {head + name: t.cpu().contiguous() for name, t in section.tensors.items()}
        buffers |= {head + name for name in section.buffers}
    known = {name: fact for name, fact in facts.items() if name != "steps"}
    if len(sections) == 1:
        known |= {"optimizer": packed[0]}
    else:
        known |= {"optimizer": {"$list": packed}, "steps": facts["steps"]}
    Checkpoint(tensors, {"format": FORMAT, **known}, buffers).write(path)


def described(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """An optimizer's type, state and settings, in the format of a section."""
    groups = [group_settings(group) for group in optimizer.param_groups]
    kept = {name: entries for name, entries in state.items() if entries}
    return {"kind": kind_of(optimizer).__name__, "state": kept, "groups": groups}
