"""What a worker has of its own between outer rounds, in a file beside the checkpoint.

The checkpoint has what all workers have in common: outer weights and momentum. A rank's own part
has its weights, its optimizer's state, and the results that it has not merged yet. It has the
checkpoint's format, and is written by its worker, on its host: all of them would take as many times
the model's bytes over rank 0's link. The checkpoint names its parts by a token, so that parts of
another one are not taken for its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import CheckpointError
from slipstream.runtime.files.checkpoint_format import misfit
from slipstream.torch.checkpoints.checkpoint import Checkpoint, check_layout
from slipstream.torch.checkpoints.kept_state import KeptState
from slipstream.torch.checkpoints.outer_weights import OuterState
from slipstream.torch.checkpoints.training_state import LocalState, TrainingState, with_models
from slipstream.torch.distribute.loading import load_models, read_fitting, restore_pair
from slipstream.torch.distribute.replica import Replica
from slipstream.torch.modes.outer_updates import OuterUpdates
from slipstream.torch.tensors.pairs import Pair


def part_path(path: Path, rank: int) -> Path:
    """A rank's part of the checkpoint at a path.

    >>> str(part_path(Path("runs/saved.safetensors"), 2))
    'runs/saved.safetensors.rank2'
    """
    return path.with_name(f"{path.name}.rank{rank}")


def write_part(
    path: Path,
    pairs: Sequence[Pair],
    replicas: Sequence[Replica],
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
    shared = with_models(pairs, [own_state(replica).fetch() for replica in replicas])
    for each, step in zip(shared, steps, strict=True):
        each.step = step
    local = [applier_of(replica).local_state() for replica in replicas]
    TrainingState(facts, shared, local=local).write(path)


def read_part(
    path: Path,
    pairs: Sequence[Pair],
    replicas: Sequence[Replica],
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
        if len(state.local) != len(replicas):
            raise ValueError("it does not say what was under way")
        for local, replica in zip(state.local, replicas, strict=True):
            check_local(local, replica)
    except ValueError as error:
        raise misfit(path, error) from error
    return checkpoint, state


def check_local(local: LocalState, replica: Replica) -> None:
    """Check a worker's progress against this job's plan; raises ValueError."""
    plan, trained = replica.plan, replica.synchronizer.inventory.tensors
    if local.inner != repr(plan.local_steps):
        raise ValueError(f"it was written with {local.inner:.200}, not {plan.local_steps}")
    under_way, known = local.under_way, range(len(plan.fragments))
    if sorted(under_way) != [fragment for fragment in known if fragment in under_way]:
        raise ValueError(f"fragments {under_way[:8]} of {len(known)}")
    like = {spec.name: tensor for spec, tensor in zip(plan.specs, trained, strict=True)}
    for given in (local.results, local.kept, local.residuals):
        for name, tensor in given.items():
            if name not in like or not isinstance(tensor, torch.Tensor):
                raise ValueError(f"it holds a result of {name!r:.80}, which the model has not")
            check_layout(f"the result of {name!r}", tensor, like[name].shape, like[name].dtype)


def take_part(
    pairs: Sequence[Pair],
    replicas: Sequence[Replica],
    part: tuple[Checkpoint, TrainingState] | None,
) -> None:
    """Go on as this rank's worker would have; without parts, all have the outer weights."""
    if part is not None:
        checkpoint, state = part
        load_models(pairs, checkpoint)
        for pair, replica, shared in zip(pairs, replicas, state.shared, strict=True):
            restore_pair(pair, own_state(replica), shared)
    for number, replica in enumerate(replicas):
        applier_of(replica).resume(None if part is None else part[1].local[number])


def own_state(replica: Replica) -> KeptState:
    """The state of the optimizer that runs in this process."""
    assert isinstance(replica.state, OuterState)
    return replica.state.own


def applier_of(replica: Replica) -> OuterUpdates:
    """What a replica with outer rounds applies results with."""
    assert isinstance(replica.synchronizer.applier, OuterUpdates)
    return replica.synchronizer.applier
