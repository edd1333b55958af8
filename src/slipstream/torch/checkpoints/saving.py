"""``job.save``: gather the state of ranks and servers, and write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.runtime.members.joining import Membership
from slipstream.torch.checkpoints.kept_state import KeptState
from slipstream.torch.checkpoints.loading import LoadedPair, share_outcome
from slipstream.torch.checkpoints.training_state import OwnState, TrainingState, with_models
from slipstream.torch.tensors.pairs import Pair
from slipstream.torch.tensors.random_state import random_state


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
    parts: Sequence[LoadedPair],
    membership: Membership,
    *,
    steps: Sequence[int],
    facts: Mapping[str, Any],
) -> None:
    """Rank 0 writes everything; all ranks return together, with the same error if there is one."""
    env = membership.env
    mine = [env.rank, random_state()]
    said = dict(membership.gathering.gather(f"{occasion}/random", mine, list[Any]))
    residuals = [each.residuals.gather() if each.residuals else {} for each in parts]
    members = {*said, *(member for each in residuals for member in each)}
    own = {
        member: OwnState(said.get(member, {}), [each.get(member, {}) for each in residuals])
        for member in members
    }
    problem = ""
    if env.rank == 0:
        try:
            states = [each.state for each in parts]
            write_state(path, pairs, states, steps, facts, own)
        except CheckpointError as error:
            problem = str(error)
    share_outcome(membership, occasion, problem)
