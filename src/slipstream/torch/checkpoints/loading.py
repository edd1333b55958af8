"""``job.load``: read a checkpoint, check all of it, and only then change any rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from slipstream.errors import CheckpointError, DamagedCheckpoint
from slipstream.runtime.exchange.state_chain import StateChain
from slipstream.runtime.files.checkpoint_format import is_model, misfit, section_name
from slipstream.runtime.members.joining import Membership
from slipstream.runtime.shared_memory.checkpoints import refuse_nonfinite
from slipstream.torch.checkpoints.checkpoint import Checkpoint, load_model, pieces_of
from slipstream.torch.checkpoints.fitting import state_for, state_in
from slipstream.torch.checkpoints.kept_state import KeptState
from slipstream.torch.checkpoints.residuals import Residuals
from slipstream.torch.checkpoints.saved_outer_state import OUTER
from slipstream.torch.checkpoints.training_state import (
    AVERAGED,
    MODEL,
    PRECISE,
    SharedState,
    TrainingState,
)
from slipstream.torch.tensors.copying import copy_state
from slipstream.torch.tensors.inventory import dtype_text, whole_state
from slipstream.torch.tensors.pairs import Pair, distinct_models, first_with
from slipstream.torch.tensors.random_state import Generators
from slipstream.torch.tensors.staging import Staging

OF_MODEL = (MODEL, AVERAGED, OUTER, PRECISE)  # what a checkpoint holds by a tensor's name


class LoadedPair(Protocol):
    """One pair's parts, as saving and loading use them.

    Attributes:
        state: The optimizer's state and averaged weights.
        residuals: Gathers and restores codecs' residuals; None if there are none.
    """

    @property
    def state(self) -> KeptState: ...

    @property
    def residuals(self) -> Residuals | None: ...

    def forget(self) -> None:
        """Forget what belongs to weights that a checkpoint has replaced."""
        ...


def load_alone(
    path: Path, pairs: Sequence[Pair], states: Sequence[KeptState], *, takes_nonfinite: bool
) -> list[int]:
    """Read a checkpoint into this process. If it is invalid, nothing changes.

    Args:
        takes_nonfinite: Also if some of it is NaN or infinite.

    Returns:
        The step of each pair.

    Raises:
        CheckpointError: The file cannot be read, or is for another model or optimizer.
    """
    checkpoint, saved = read_fitting(path, pairs, takes_nonfinite=takes_nonfinite)
    load_models(pairs, checkpoint)
    for pair, state, shared in zip(pairs, states, saved.shared, strict=True):
        restore_pair(pair, state, shared)
    restore_generators(saved, rank=0)
    return [shared.step for shared in saved.shared]


def load_job(
    path: Path,
    occasion: str,
    pairs: Sequence[Pair],
    parts: Sequence[LoadedPair],
    chain: StateChain,
    membership: Membership,
    *,
    takes_nonfinite: bool,
) -> TrainingState:
    """Rank 0 reads and checks; all ranks end with the same state.

    Nothing changes on any rank before rank 0 has checked all of it.

    Args:
        occasion: The name of this gathering, a new one for each call.
        chain: Copies rank 0's tensors to all ranks.
        takes_nonfinite: Also if some of it is NaN or infinite.

    Returns:
        All of it but the models, which are loaded.

    Raises:
        CheckpointError: The file cannot be read or is invalid, or a worker died meanwhile.
    """
    rank, gathering = membership.env.rank, membership.gathering
    checkpoint, problem = Checkpoint(), ""
    if rank == 0:
        try:
            checkpoint, _ = read_fitting(path, pairs, takes_nonfinite=takes_nonfinite)
        except CheckpointError as error:
            problem = str(error)
    with chain.opened():
        # No rank sends before all ranks are ready to receive.
        gathering.gather(f"{occasion}/begun", True, bool)
        share_outcome(membership, occasion, problem)
        if rank == 0:
            load_models(pairs, checkpoint)
        copied = [copy_state(chain, model) for model in distinct_models(pairs)]
        checkpoint, rest = spread(checkpoint, occasion, chain, membership)
        if not all(gathering.gather(f"{occasion}/whole", all(copied) and rest, bool)):
            raise CheckpointError(f"a worker died while {path} was copied: load it again")
        saved = state_in(checkpoint)
        for number, each in enumerate(parts):
            each.forget()
            if each.residuals is not None:
                residuals = {who: own.residuals[number] for who, own in saved.own.items()}
                each.residuals.restore(residuals)
    for pair, each, shared in zip(pairs, parts, saved.shared, strict=True):
        restore_pair(pair, each.state, shared)
    # Rank 0's weights are sent from their own memory: no rank trains before all have them.
    gathering.gather(f"{occasion}/done", True, bool)
    restore_generators(saved, rank)
    return saved


def restore_pair(pair: Pair, state: KeptState, saved: SharedState) -> None:
    """Restore everything except the model itself."""
    for group, settings in zip(pair.optimizer.param_groups, saved.optimizer.groups, strict=True):
        group.update(settings)
    state.restore(saved)


def load_models(pairs: Sequence[Pair], checkpoint: Checkpoint) -> None:
    for number, pair in enumerate(pairs):
        if first_with(pairs, number) == number:
            load_model(pair.model, checkpoint, section_name(number, len(pairs)))


def restore_generators(saved: TrainingState, rank: int) -> None:
    """Restore random generators, on ranks that the writing job had too."""
    if rank in saved.own and saved.own[rank].random:
        Generators.of(saved.own[rank].random).restore()


def read_fitting(
    path: Path, pairs: Sequence[Pair], *, takes_nonfinite: bool
) -> tuple[Checkpoint, TrainingState]:
    """A checkpoint that has passed all checks, so that loading it cannot fail, and what it holds.

    Args:
        takes_nonfinite: Also if some of it is NaN or infinite.

    Raises:
        DamagedCheckpoint: The file was damaged after it was written.
        CheckpointError: It cannot be read, is of another model, optimizer or job, or not finite.
    """
    try:
        checkpoint = Checkpoint.read(path)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{error}; load an earlier checkpoint") from error
    try:
        state = state_for(checkpoint, pairs)
    except ValueError as error:
        raise misfit(path, error) from error
    if not takes_nonfinite:
        untrained = untrained_in(pairs)
        refuse_nonfinite(path, pieces_of(checkpoint.tensors), untrained=untrained)
    return checkpoint, state


def untrained_in(pairs: Sequence[Pair]) -> set[str]:
    """Names in a checkpoint of buffers and frozen parameters, which may be infinite on purpose."""
    untrained = set()
    for number, pair in enumerate(pairs):
        trained = {name for name, p in pair.model.named_parameters() if p.requires_grad}
        section = section_name(number, len(pairs))
        for name, _ in whole_state(pair.model):
            if name not in trained:
                untrained |= {f"{section}{kind}{name}" for kind in OF_MODEL}
    return untrained


def spread(
    checkpoint: Checkpoint, occasion: str, chain: StateChain, membership: Membership
) -> tuple[Checkpoint, bool]:
    """Send everything except the models from rank 0 to all; returns it, and whether all arrived."""
    gathering, rank = membership.gathering, membership.env.rank
    if rank == 0:
        rest = {n: t for n, t in checkpoint.tensors.items() if not is_model(n)}
        shapes = [[n, list(t.shape), dtype_text(t.dtype)] for n, t in rest.items()]
        gathering.post(f"{occasion}/rest", [shapes, checkpoint.facts])
    else:
        shapes, facts = gathering.read(f"{occasion}/rest", 0, list[Any])
        rest = {n: torch.empty(shape, dtype=getattr(torch, kind)) for n, shape, kind in shapes}
        checkpoint = Checkpoint(facts=facts)
    staging = Staging()
    whole = chain.run([staging.writable(key, t) for key, t in enumerate(rest.values())])
    checkpoint.tensors.update(rest)
    return checkpoint, whole


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
