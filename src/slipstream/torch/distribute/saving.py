"""``job.save``: gather the state of ranks and servers, and write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import CheckpointError
from slipstream.runtime.members.joining import Membership
from slipstream.torch.checkpoints.kept_state import KeptState
from slipstream.torch.checkpoints.training_state import OwnState, TrainingState, with_models
from slipstream.torch.distribute.replica import Replica
from slipstream.torch.tensors.inventory import whole_state
from slipstream.torch.tensors.pairs import Pair
from slipstream.torch.tensors.random_state import random_state

Optimizer = torch.optim.Optimizer


def write_state(
    path: Path,
    pairs: Sequence[Pair],
    states: Sequence[KeptState],
    steps: Sequence[int],
    facts: Mapping[str, Any],
    own: Mapping[int | str, OwnState],
) -> None:
    """Fetch the state that workers have in common, and write it with what each has of its own.

    Args:
        states: By pair.
        steps: By pair, to which the steps that a state itself tells are added.
    """
    shared = with_models(pairs, [state.fetch() for state in states])
    for each, step in zip(shared, steps, strict=True):
        each.step += step
    TrainingState(facts, shared, own).write(path)


def save_job(
    path: Path,
    occasion: str,
    pairs: Sequence[Pair],
    replicas: Sequence[Replica],
    membership: Membership,
    *,
    steps: Sequence[int],
    facts: Mapping[str, Any],
) -> None:
    """Rank 0 writes everything; all ranks return together, with the same error if there is one."""
    env = membership.env
    mine = [env.rank, random_state()]
    said = dict(membership.gathering.gather(f"{occasion}/random", mine, list[Any]))
    residuals = [replica.residuals.gather() if replica.residuals else {} for replica in replicas]
    members = {*said, *(member for each in residuals for member in each)}
    own = {
        member: OwnState(said.get(member, {}), [each.get(member, {}) for each in residuals])
        for member in members
    }
    problem = ""
    if env.rank == 0:
        try:
            states = [replica.state for replica in replicas]
            write_state(path, pairs, states, steps, facts, own)
        except CheckpointError as error:
            problem = str(error)
    share_outcome(membership, occasion, problem)


def take_weights(model: nn.Module, replica: Replica) -> None:
    """Copy the servers' weights into the model."""
    own = dict(whole_state(model))
    with torch.no_grad():
        for name, weights in replica.state.fetch().model.items():
            own[name].data.copy_(weights)


def share_outcome(membership: Membership, occasion: str, problem: str) -> None:
    """Share rank 0's success or failure with all ranks.

    Args:
        problem: Rank 0's error; empty if it succeeded.

    Raises:
        CheckpointError: Rank 0 has failed.
    """
    if membership.env.rank == 0:
        membership.gathering.post(f"{occasion}/outcome", problem)
    said = membership.gathering.read(f"{occasion}/outcome", 0, str)
    if said:
        raise CheckpointError(said)


def kept_averages(replica: Replica) -> dict[str, torch.Tensor]:
    """Averaged weights by the parameter's name, if any are kept."""
    return {} if replica.plan.update.average is None else replica.state.fetch().averages
