"""What a worker has of its own between outer rounds, in a file beside the checkpoint.

The checkpoint has what all workers have in common: outer weights and momentum. A rank's own part
has its weights, its optimizer's state, and the results that it has not merged yet. It has the
checkpoint's format, and is written by its worker, on its host: all of them would take as many times
the model's bytes over rank 0's link. The checkpoint names its parts by a token, so that parts of
another one are not taken for its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import torch

from slipstream.errors import CheckpointError
from slipstream.runtime.files.checkpoint_format import misfit, sections_in, unpack
from slipstream.torch.checkpoints.checkpoint import Checkpoint, check_layout, pack
from slipstream.torch.checkpoints.fitting import named_under
from slipstream.torch.checkpoints.kept_state import KeptState
from slipstream.torch.checkpoints.outer_weights import OuterState, Standing
from slipstream.torch.checkpoints.sections import Section, write
from slipstream.torch.distribute.loading import load_models, read_fitting, restore_pair, sections_of
from slipstream.torch.distribute.replica import Replica
from slipstream.torch.modes.outer_updates import OuterUpdates
from slipstream.torch.tensors.pairs import Pair

LOCAL = "local/"


def part_path(path: Path, rank: int) -> Path:
    """A rank's part of the checkpoint at a path.

    >>> str(part_path(Path("runs/saved.safetensors"), 2))
    'runs/saved.safetensors.rank2'
    """
    return path.with_name(f"{path.name}.rank{rank}")


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """One rank's part, read and checked."""

    checkpoint: Checkpoint
    standings: tuple[Standing, ...]  # by pair


def write_part(
    path: Path, pairs: Sequence[Pair], replicas: Sequence[Replica], facts: Mapping[str, Any]
) -> None:
    """Write what this worker has of its own.

    Args:
        path: The part's own.
        facts: Of the checkpoint; ``parts`` is its token.

    Raises:
        CheckpointError: It cannot be written.
    """
    sections, standings = [], []
    for number, replica in enumerate(replicas):
        section = Section.of(pairs, number, own_state(replica).fetch())
        standing = applier_of(replica).standing()
        known = {field.name: getattr(standing, field.name) for field in fields(standing)}
        standings.append(pack(known, LOCAL.rstrip("/"), section.tensors))
        sections.append(section)
    write(path, sections, {**facts, "random": [], "local": standings})


def read_part(
    path: Path,
    pairs: Sequence[Pair],
    replicas: Sequence[Replica],
    token: str,
    *,
    takes_nonfinite: bool,
) -> WorkerPart:
    """Read this worker's part of a checkpoint; nothing changes yet.

    Args:
        takes_nonfinite: Also if some of it is NaN or infinite.

    Raises:
        CheckpointError: There is none, it belongs to another checkpoint, or does not fit this job.
    """
    checkpoint = read_fitting(path, pairs, takes_nonfinite=takes_nonfinite)
    if checkpoint.facts.get("parts") != token:
        raise CheckpointError(f"{path} belongs to another checkpoint")
    try:
        packed = checkpoint.facts.get("local")
        if not isinstance(packed, list) or len(packed) != len(replicas):
            raise ValueError("it does not say what was under way")
        sections = sections_in(checkpoint.facts, checkpoint.tensors)
        standings = tuple(
            standing_in(each, tensors, replica)
            for each, (_, tensors), replica in zip(packed, sections, replicas, strict=True)
        )
    except ValueError as error:
        raise misfit(path, error) from error
    return WorkerPart(checkpoint, standings)


def standing_in(packed: Any, tensors: Mapping[str, torch.Tensor], replica: Replica) -> Standing:
    """A worker's standing, checked against this job's plan; raises ValueError."""
    own = {LOCAL + name: tensor for name, tensor in named_under(LOCAL, tensors).items()}
    try:
        standing = msgspec.convert(unpack(packed, own), Standing)
    except msgspec.ValidationError as error:
        raise ValueError(f"what was under way is damaged: {error}") from error
    plan, trained = replica.plan, replica.synchronizer.inventory.tensors
    if standing.inner != repr(plan.local_steps):
        raise ValueError(f"it was written with {standing.inner:.200}, not {plan.local_steps}")
    under_way, known = standing.under_way, range(len(plan.fragments))
    if sorted(under_way) != [fragment for fragment in known if fragment in under_way]:
        raise ValueError(f"fragments {under_way[:8]} of {len(known)}")
    like = {spec.name: tensor for spec, tensor in zip(plan.specs, trained, strict=True)}
    for given in (standing.results, standing.kept, standing.residuals):
        for name, tensor in given.items():
            if name not in like or not isinstance(tensor, torch.Tensor):
                raise ValueError(f"it holds a result of {name!r:.80}, which the model has not")
            check_layout(f"the result of {name!r}", tensor, like[name].shape, like[name].dtype)
    return standing


def take_part(pairs: Sequence[Pair], replicas: Sequence[Replica], part: WorkerPart | None) -> None:
    """Go on as this rank's worker would have; without parts, all have the outer weights."""
    if part is not None:
        load_models(pairs, part.checkpoint)
        sections = sections_of(part.checkpoint)
        for pair, replica, section in zip(pairs, replicas, sections, strict=True):
            restore_pair(pair, own_state(replica), section)
    for number, replica in enumerate(replicas):
        applier_of(replica).resume(None if part is None else part.standings[number])


def own_state(replica: Replica) -> KeptState:
    """The state of the optimizer that runs in this process."""
    assert isinstance(replica.state, OuterState)
    return replica.state.own


def applier_of(replica: Replica) -> OuterUpdates:
    """What a replica with outer rounds applies results with."""
    assert isinstance(replica.synchronizer.applier, OuterUpdates)
    return replica.synchronizer.applier
