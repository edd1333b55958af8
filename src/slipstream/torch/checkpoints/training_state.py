"""The state of a training in two halves: what all workers have in common, and each one's own.

A checkpoint's file has a section for every pair of a model and an optimizer. The only section of a
job with one pair has plain names, see ``checkpoint_format``. Tensors are held by reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from slipstream.runtime.files.checkpoint_format import (
    FORMAT,
    OptimizerState,
    optimizer_in,
    section_name,
    unpack,
)
from slipstream.torch.checkpoints.checkpoint import Checkpoint, model_tensors, pack
from slipstream.torch.checkpoints.saved_outer_state import outer_states, outer_tensors
from slipstream.torch.optimizers.loop_optimizer import kind_of
from slipstream.torch.tensors.inventory import group_settings
from slipstream.torch.tensors.pairs import Pair, first_with

Tensors = dict[str, torch.Tensor]
MODEL, AVERAGED, PRECISE, RESIDUAL = "model/", "averaged/", "precise/", "residual/"
LOCAL = "local/"
HOLDERS = "servers"  # the member in whose name a file has the residuals of results


@dataclass(slots=True)
class SharedState:
    """One pair's state that all workers have in common; tensors by the parameter's name.

    Attributes:
        optimizer: Its type, state and settings.
        model: Weights that are elsewhere than in the model; in a file, the whole model, unless an
            earlier pair has the same one.
        buffers: Names of tensors in ``model`` that may become infinite on purpose.
        averages: Averaged weights, if any are kept.
        outer: The outer optimizer's state, by the parameter's and the entry's name.
        precise: Outer weights in float32, of parameters that have fewer bits.
        step: The step, or round, after which all of this was so.
    """

    optimizer: OptimizerState
    model: Tensors = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    averages: Tensors = field(default_factory=dict)
    outer: dict[str, Tensors] = field(default_factory=dict)
    precise: Tensors = field(default_factory=dict)
    step: int = 0

    @classmethod
    def of(cls, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> SharedState:
        """Read a section; raises ValueError."""
        return cls(
            optimizer_in(facts, tensors),
            model=named_under(MODEL, tensors),
            averages=named_under(AVERAGED, tensors),
            outer=outer_states(tensors),
            precise=named_under(PRECISE, tensors),
            step=int(facts["step"]),
        )

    def tensors(self) -> Tensors:
        """All but the optimizer's, by their names in a section."""
        named = ((MODEL, self.model), (AVERAGED, self.averages), (PRECISE, self.precise))
        found = {head + name: t for head, tensors in named for name, t in tensors.items()}
        return found | outer_tensors(self.outer)


@dataclass(frozen=True, slots=True)
class LocalState:
    """A worker's progress between outer rounds, besides its weights and its optimizer's state.

    Attributes:
        inner: The ``LocalSteps`` by which it trains.
        alike: Whether all workers have the outer weights.
        under_way: Fragments, in the order in which they were sent.
        results: By tensor's name, of these fragments.
        counted: The tensors of which this worker's outer gradient counted.
        kept: By tensor's name: see ``Arrived``.
        residuals: By tensor's name, where servers apply; else ``OwnState`` has them.
    """

    inner: str
    alike: bool
    under_way: list[int]
    results: Tensors
    counted: list[str]
    kept: Tensors
    residuals: Tensors

    @classmethod
    def of(cls, packed: Any, tensors: Mapping[str, torch.Tensor]) -> LocalState:
        """Read it from a section; raises ValueError."""
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(LOCAL)}
        try:
            return msgspec.convert(unpack(packed, own), cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"what was under way is damaged: {error}") from error


@dataclass(slots=True)
class OwnState:
    """What one member alone has.

    A worker's random generators are under its rank; its residuals under its number in the plan,
    which is its host's where the workers of a host aggregate first.

    Attributes:
        random: The state of its random generators; empty if it is not known.
        residuals: By pair and tensor's name: what it has not sent yet.
    """

    random: dict[str, Any] = field(default_factory=dict)
    residuals: Sequence[Tensors] = ()


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A whole training: what a checkpoint's file holds.

    Attributes:
        facts: About the job: its strategy, the number of workers.
        shared: By pair.
        own: By member: a worker's number, or ``HOLDERS``.
        local: By pair: a worker's progress between outer rounds, in the file that it writes beside
            the others' checkpoint. The rest of that file is the worker's own, too.
    """

    facts: Mapping[str, Any]
    shared: Sequence[SharedState]
    own: Mapping[int | str, OwnState] = field(default_factory=dict)
    local: Sequence[LocalState] = ()

    def write(self, path: Path) -> None:
        """Write everything as one file.

        Raises:
            CheckpointError: It cannot be written, or could not be read back.
        """
        tensors: Tensors = {}
        buffers: set[str] = set()
        packed, local = [], []
        for number, shared in enumerate(self.shared):
            section = shared.tensors()
            for member, own in self.own.items():
                for residuals in own.residuals[number : number + 1]:
                    head = f"{RESIDUAL}{member}/"
                    section |= {head + name: residual for name, residual in residuals.items()}
            for state in self.local[number : number + 1]:
                progress = {each.name: getattr(state, each.name) for each in fields(state)}
                local.append(pack(progress, LOCAL.rstrip("/"), section))
            # References within a section use names within it.
            packed.append(pack(described(shared.optimizer), "optimizer", section))
            head = section_name(number, len(self.shared))
            # Held weights may be on an accelerator, or laid out as convolutions prefer.
            tensors |= {head + name: t.cpu().contiguous() for name, t in section.items()}
            buffers |= {f"{head}{MODEL}{name}" for name in shared.buffers}
        steps = [shared.step for shared in self.shared]
        known = {**self.facts, "step": steps[0], "random": self._random()}
        if local:
            known["local"] = local
        if len(self.shared) == 1:
            known["optimizer"] = packed[0]
        else:
            known |= {"optimizer": {"$list": packed}, "steps": steps}
        Checkpoint(tensors, {"format": FORMAT, **known}, buffers).write(path)

    def _random(self) -> list[dict[str, Any]]:
        """By rank, up to the last one whose generators are known."""
        known = {rank for rank, own in self.own.items() if isinstance(rank, int) and own.random}
        ranks = range(max(known, default=-1) + 1)
        return [self.own[rank].random if rank in known else {} for rank in ranks]


def described(optimizer: OptimizerState) -> dict[str, Any]:
    """An optimizer in the format of a section."""
    kept = {name: entries for name, entries in optimizer.state.items() if entries}
    return {"kind": optimizer.kind, "state": kept, "groups": optimizer.groups}


def optimizer_state(
    optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Any]]
) -> OptimizerState:
    """An optimizer's type and settings, with state that may be elsewhere.

    Args:
        state: By the parameter's and the entry's name.
    """
    groups = [group_settings(group) for group in optimizer.param_groups]
    return OptimizerState(kind_of(optimizer).__name__, state, groups)


def with_models(pairs: Sequence[Pair], fetched: Sequence[SharedState]) -> list[SharedState]:
    """Complete states with copies of the models; weights that are elsewhere replace the models'."""
    weights: dict[int, torch.Tensor] = {}  # by identity: models may share tensors
    for pair, shared in zip(pairs, fetched, strict=True):
        own = named_tensors(pair.model)
        weights |= {id(own[name]): tensor for name, tensor in shared.model.items()}
    for number, (pair, shared) in enumerate(zip(pairs, fetched, strict=True)):
        if first_with(pairs, number) != number:
            shared.model = {}
            continue
        shared.model = named_under(MODEL, model_tensors(pair.model))
        shared.buffers = {name for name, _ in pair.model.named_buffers()}
        for name, tensor in named_tensors(pair.model).items():
            if name in shared.model and id(tensor) in weights:
                shared.model[name] = weights[id(tensor)]
    return list(fetched)


def named_tensors(model: nn.Module) -> Tensors:
    return dict([*model.named_parameters(), *model.named_buffers()])


def named_under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors in a section under a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
