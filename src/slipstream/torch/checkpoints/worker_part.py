"""What a worker has of its own between outer rounds, in a file beside the checkpoint.

The checkpoint has what all workers have in common: outer weights and momentum. A rank's own part
has its weights, its optimizer's state, and the results that it has not merged yet. It has the
checkpoint's format, and is written by its worker, on its host: all of them would take as many times
the model's bytes over rank 0's link. The checkpoint names its parts by a token, so that parts of
another one are not taken for its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from slipstream.errors import CheckpointError
from slipstream.plan import Plan
from slipstream.runtime.files.checkpoint_format import misfit
from slipstream.torch.checkpoints.checkpoint import Checkpoint, check_layout
from slipstream.torch.checkpoints.kept_state import KeptState
from slipstream.torch.checkpoints.loading import load_models, read_fitting, restore_pair
from slipstream.torch.checkpoints.training_state import LocalState, TrainingState, with_models
from slipstream.torch.tensors.pairs import Pair


def part_path(path: Path, rank: int) -> Path:
    """A rank's part of the checkpoint at a path.

    >>> str(part_path(Path("runs/saved.safetensors"), 2))
    'runs/saved.safetensors.rank2'
    """
    return path.with_name(f"{path.name}.rank{rank}")


class LocalProgress(Protocol):
    """A worker's progress between outer rounds."""

    def local_state(self) -> LocalState:
        """Return it; waits for the results of what is under way."""
        ...

    def resume(self, saved: LocalState | None) -> None:
        """Go on from it; None: all workers have the outer weights."""
        ...


@dataclass(frozen=True, slots=True)
class PartOfPair:
    """One pair, as a worker's own part of a checkpoint has it.

    Attributes:
        tensors: The live ones, in the order of the plan's.
        progress: Of this worker between outer rounds.
        state: Of the optimizer that runs in this process.
    """

    plan: Plan
    tensors: Sequence[torch.Tensor]
    progress: LocalProgress
    state: KeptState


def write_part(
    path: Path,
    pairs: Sequence[Pair],
    parts: Sequence[PartOfPair],
    steps: Sequence[int],
    facts: Mapping[str, Any],
) -> None:
    """Write what this worker has of its own.

    Args:
        path: The part's own.
        facts: Of the checkpoint; ``parts`` is its token.

    Raises:
        CheckpointError: It cannot be written.
    """
    shared = with_models(pairs, [part.state.fetch() for part in parts])
    for each, step in zip(shared, steps, strict=True):
        each.step = step
    local = [part.progress.local_state() for part in parts]
    TrainingState(facts, shared, local=local).write(path)


def read_part(
    path: Path,
    pairs: Sequence[Pair],
    parts: Sequence[PartOfPair],
    token: str,
    *,
    takes_nonfinite: bool,
) -> tuple[Checkpoint, TrainingState]:
    """Read this worker's part of a checkpoint; nothing changes yet.

    Args:
        takes_nonfinite: Also if some of it is NaN or infinite.

    Raises:
        CheckpointError: There is none, it belongs to another checkpoint, or does not fit this job.
    """
    checkpoint, state = read_fitting(path, pairs, takes_nonfinite=takes_nonfinite)
    if state.facts.get("parts") != token:
        raise CheckpointError(f"{path} belongs to another checkpoint")
    try:
        if len(state.local) != len(parts):
            raise ValueError("it does not say what was under way")
        for local, part in zip(state.local, parts, strict=True):
            check_local(local, part)
    except ValueError as error:
        raise misfit(path, error) from error
    return checkpoint, state


def check_local(local: LocalState, part: PartOfPair) -> None:
    """Check a worker's progress against this job's plan; raises ValueError."""
    plan = part.plan
    if local.inner != repr(plan.local_steps):
        raise ValueError(f"it was written with {local.inner:.200}, not {plan.local_steps}")
    under_way, known = local.under_way, range(len(plan.fragments))
    if sorted(under_way) != [fragment for fragment in known if fragment in under_way]:
        raise ValueError(f"fragments {under_way[:8]} of {len(known)}")
    like = {spec.name: tensor for spec, tensor in zip(plan.specs, part.tensors, strict=True)}
    for given in (local.results, local.kept, local.residuals):
        for name, tensor in given.items():
            if name not in like or not isinstance(tensor, torch.Tensor):
                raise ValueError(f"it holds a result of {name!r:.80}, which the model has not")
            check_layout(f"the result of {name!r}", tensor, like[name].shape, like[name].dtype)


def take_part(
    pairs: Sequence[Pair],
    parts: Sequence[PartOfPair],
    saved: tuple[Checkpoint, TrainingState] | None,
) -> None:
    """Go on as this rank's worker would have; without parts, all have the outer weights."""
    if saved is not None:
        checkpoint, state = saved
        load_models(pairs, checkpoint)
        for pair, own, shared in zip(pairs, parts, state.shared, strict=True):
            restore_pair(pair, own.state, shared)
    for number, own in enumerate(parts):
        own.progress.resume(None if saved is None else saved[1].local[number])
