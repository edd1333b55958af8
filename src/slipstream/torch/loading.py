"""``job.load``: read a checkpoint, check all of it, and only then give everybody a share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import CheckpointError, DamagedCheckpoint
from slipstream.runtime.checkpoint_format import OptimizerState, misfit, optimizer_in
from slipstream.runtime.joining import Membership
from slipstream.torch.averages import Averages
from slipstream.torch.checkpoint import Checkpoint, load_model
from slipstream.torch.copying import copy_state
from slipstream.torch.fitting import averages_in, check_all
from slipstream.torch.random_state import Generators
from slipstream.torch.replica import Replica
from slipstream.torch.saving import share_outcome
from slipstream.torch.shard_optimizer import AVERAGE
from slipstream.torch.staging import Staging

Optimizer = torch.optim.Optimizer


def load_job(
    path: Path,
    occasion: str,
    model: nn.Module,
    optimizer: Optimizer,
    replica: Replica | None,
    membership: Membership | None,
    averages: Averages | None,
) -> int:
    """Rank 0 reads and checks; everybody ends with the same state. Returns the step.

    Nothing changes anywhere before rank 0 has found all of it to fit.
    """
    checkpoint, problem = Checkpoint(), ""
    if membership is None or membership.env.rank == 0:
        try:
            checkpoint = read_fitting(path, model, optimizer)
        except CheckpointError as error:
            if membership is None:
                raise
            problem = str(error)
    if membership is not None and replica is not None:
        with replica.chain.opened():
            # Nobody sends before everybody would take it.
            membership.gathering.gather(f"{occasion}/begun", True, bool)
            share_outcome(membership, occasion, problem)
            if membership.env.rank == 0:
                load_model(model, checkpoint)
            whole = copy_state(replica.chain, model)
            checkpoint, rest = spread(checkpoint, occasion, replica, membership)
            if not all(membership.gathering.gather(f"{occasion}/whole", whole and rest, bool)):
                raise CheckpointError(f"a worker died while {path} was copied: load it again")
            if replica.residuals is not None:
                replica.residuals.restore(checkpoint.tensors)
    else:
        load_model(model, checkpoint)
    restore_optimizer(model, optimizer, checkpoint, replica, membership)
    if averages is not None:
        averages.load(averages_in(checkpoint.tensors))
    if membership is not None:
        # Rank 0's weights travel from their own memory: nobody trains before all have them.
        membership.gathering.gather(f"{occasion}/done", True, bool)
    rank = membership.env.rank if membership is not None else 0
    if rank < len(checkpoint.facts["random"]) and checkpoint.facts["random"][rank]:
        Generators.of(checkpoint.facts["random"][rank]).restore()
    return int(checkpoint.facts["step"])


def read_fitting(path: Path, model: nn.Module, optimizer: Optimizer) -> Checkpoint:
    """A checkpoint that can be loaded without anything left to go wrong."""
    try:
        checkpoint = Checkpoint.read(path)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{error}; load an earlier checkpoint") from error
    try:
        check_all(checkpoint.tensors, checkpoint.facts, model, optimizer)
    except ValueError as error:
        raise misfit(path, error) from error
    return checkpoint


def spread(
    checkpoint: Checkpoint, occasion: str, replica: Replica, membership: Membership
) -> tuple[Checkpoint, bool]:
    """Everything but the model, from rank 0 to all; and whether all of it has come."""
    gathering, rank = membership.gathering, membership.env.rank
    if rank == 0:
        rest = {n: t for n, t in checkpoint.tensors.items() if not n.startswith("model/")}
        shapes = [[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in rest.items()]
        gathering.post(f"{occasion}/rest", [shapes, checkpoint.facts])
    else:
        shapes, facts = gathering.read(f"{occasion}/rest", 0, list[Any])
        rest = {n: torch.empty(shape, dtype=getattr(torch, kind)) for n, shape, kind in shapes}
        checkpoint = Checkpoint(facts=facts)
    staging = Staging()
    whole = replica.chain.run([staging.writable(key, t) for key, t in enumerate(rest.values())])
    checkpoint.tensors.update(rest)
    return checkpoint, whole


def restore_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    checkpoint: Checkpoint,
    replica: Replica | None,
    membership: Membership | None,
) -> None:
    saved = optimizer_in(checkpoint.facts, checkpoint.tensors)
    for group, settings in zip(optimizer.param_groups, saved.groups, strict=True):
        group.update(settings)
    if replica is not None and replica.server_state is not None:
        if membership is not None and membership.env.rank == 0:
            restore_servers(saved, averages_in(checkpoint.tensors), replica)
        return
    by_name = dict(model.named_parameters())
    optimizer.state.clear()
    for name, entries in saved.state.items():
        parameter = by_name[name]
        optimizer.state[parameter] = {
            key: placed(value, parameter) for key, value in entries.items()
        }


def restore_servers(
    saved: OptimizerState, averages: dict[str, torch.Tensor], replica: Replica
) -> None:
    """Weights, state and averages go to whichever servers hold them now."""
    assert replica.server_state is not None
    assert replica.service is not None
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, spec in enumerate(replica.plan.specs):
        entries = saved.state.get(spec.name, {})
        state[index] = {k: torch.as_tensor(v) for k, v in entries.items() if v is not None}
        if spec.name in averages:
            state[index][AVERAGE] = averages[spec.name]
    replica.server_state.send_weights()
    replica.server_state.restore(state)
    replica.service.accounts()  # answered after all of it has come


def placed(value: Any, parameter: torch.Tensor) -> Any:
    """State of the parameter's shape lives where the parameter does; counters stay put."""
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return value.to(parameter.device)
    return value
