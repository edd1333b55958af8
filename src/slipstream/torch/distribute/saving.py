"""``job.save``: gather the state of ranks and servers, and write it.

A file has a section for every pair of a model and an optimizer. The only section of a job with one
pair has plain names, see ``checkpoint_format``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import CheckpointError
from slipstream.runtime.members.joining import Membership
from slipstream.torch.checkpoints.kept_state import KeptState
from slipstream.torch.checkpoints.sections import Section, sections_with, write
from slipstream.torch.distribute.replica import Replica
from slipstream.torch.tensors.inventory import whole_state
from slipstream.torch.tensors.pairs import Pair
from slipstream.torch.tensors.random_state import random_state

Optimizer = torch.optim.Optimizer


def save_alone(
    path: Path, pairs: Sequence[Pair], states: Sequence[KeptState], facts: Mapping[str, Any]
) -> None:
    """Write the state of this process, which is everything."""
    sections = [Section.of(pairs, number, state.fetch()) for number, state in enumerate(states)]
    write(path, sections, {**facts, "random": [random_state()]})


def save_job(
    path: Path,
    occasion: str,
    pairs: Sequence[Pair],
    replicas: Sequence[Replica],
    membership: Membership,
    *,
    facts: Mapping[str, Any],
) -> None:
    """Rank 0 writes everything; all ranks return together, with the same error if there is one."""
    env = membership.env
    own = [env.rank, random_state()]
    said = dict(membership.gathering.gather(f"{occasion}/random", own, list[Any]))
    generators = [said.get(rank, {}) for rank in range(env.world_size)]
    problem = ""
    owed = [replica.residuals.gather() if replica.residuals else {} for replica in replicas]
    if env.rank == 0:
        try:
            held = [replica.state.fetch() for replica in replicas]
            sections = sections_with(pairs, held)
            for section, tensors in zip(sections, owed, strict=True):
                section.tensors |= tensors
            write(path, sections, {**facts, "random": generators})
        except CheckpointError as error:
            problem = str(error)
    share_outcome(membership, occasion, problem)


def save_servers(
    path: Path, pairs: Sequence[Pair], replicas: Sequence[Replica], facts: Mapping[str, Any]
) -> None:
    """Write the servers' state; for each pair, of one round where servers agree on rounds."""
    held = [replica.state.fetch() for replica in replicas]
    steps = list(facts["steps"])
    for number, replica in enumerate(replicas):
        if replica.plan.consistency.agreed:
            steps[number] += held[number].round * replica.plan.steps_a_round
    facts = {**facts, "step": steps[0], "steps": steps, "random": [random_state()]}
    write(path, sections_with(pairs, held), facts)


def take_weights(model: nn.Module, replica: Replica) -> None:
    """Copy the servers' weights into the model."""
    own = dict(whole_state(model))
    with torch.no_grad():
        for name, weights in replica.state.fetch().weights.items():
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
