"""``job.save``: gather what is spread over ranks and servers, and write it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import CheckpointError
from slipstream.runtime.checkpoint_format import FORMAT
from slipstream.runtime.joining import Membership
from slipstream.torch.checkpoint import Checkpoint, model_tensors, pack
from slipstream.torch.inventory import whole_state
from slipstream.torch.loop_optimizer import kind_of
from slipstream.torch.random_state import random_state
from slipstream.torch.replica import Replica
from slipstream.torch.shard_optimizer import AVERAGE, WEIGHTS

Optimizer = torch.optim.Optimizer


def save_job(
    path: Path,
    occasion: str,
    model: nn.Module,
    optimizer: Optimizer,
    replica: Replica | None,
    membership: Membership | None,
    facts: Mapping[str, Any],
    averages: Mapping[str, torch.Tensor],
) -> None:
    """Rank 0 writes everything; all ranks leave together, with the same error if there is one."""
    generators = [random_state()]
    if membership is not None:
        own = [membership.env.rank, generators[0]]
        said = dict(membership.gathering.gather(f"{occasion}/random", own, list[Any]))
        generators = [said.get(rank, {}) for rank in range(membership.env.world_size)]
    problem = ""
    owed = replica.residuals.gather() if replica is not None and replica.residuals else {}
    if membership is None or membership.env.rank == 0:
        try:
            state = optimizer_state(model, optimizer, replica)
            write(
                path,
                model,
                {**model_tensors(model), **owed},
                state,
                averages,
                {**facts, "random": generators},
            )
        except CheckpointError as error:
            if membership is None:
                raise
            problem = str(error)
    if membership is not None:
        share_outcome(membership, occasion, problem)


def save_servers(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    replica: Replica,
    facts: Mapping[str, Any],
) -> None:
    """Write what the servers have, all of one round where they agree on rounds."""
    assert replica.server_state is not None
    fetched = by_name(replica)
    tensors = model_tensors(model)
    averages = {}
    for name, entries in fetched.items():
        tensors[f"model/{name}"] = entries.pop(WEIGHTS)
        if AVERAGE in entries:
            averages[name] = entries.pop(AVERAGE)
    state = described(optimizer, fetched)
    if replica.plan.consistency.agreed:
        facts = {**facts, "step": facts["step"] + replica.server_state.round}
    facts = {**facts, "random": [random_state()]}
    write(path, model, tensors, state, averages, facts)


def take_weights(model: nn.Module, replica: Replica) -> None:
    """The servers' weights become the model's."""
    own = dict(whole_state(model))
    with torch.no_grad():
        for name, entries in by_name(replica).items():
            own[name].data.copy_(entries[WEIGHTS])


def write(
    path: Path,
    model: nn.Module,
    tensors: dict[str, torch.Tensor],
    optimizer: dict[str, Any],
    averages: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
) -> None:
    checkpoint = Checkpoint({**tensors, **{f"averaged/{n}": t for n, t in averages.items()}})
    checkpoint.buffers = {f"model/{name}" for name, _ in model.named_buffers()}
    packed = pack(optimizer, "optimizer", checkpoint.tensors)
    checkpoint.facts = {"format": FORMAT, **facts, "optimizer": packed}
    checkpoint.write(path)


def share_outcome(membership: Membership, occasion: str, problem: str) -> None:
    """Rank 0's success or failure becomes everybody's."""
    if membership.env.rank == 0:
        membership.gathering.post(f"{occasion}/outcome", problem)
    said = membership.gathering.read(f"{occasion}/outcome", 0, str)
    if said:
        raise CheckpointError(said)


def optimizer_state(
    model: nn.Module, optimizer: Optimizer, replica: Replica | None
) -> dict[str, Any]:
    """State by parameter name, wherever it lives, and the groups' settings."""
    if replica is not None and replica.server_state is not None:
        state: dict[str, Any] = by_name(replica)
        for entries in state.values():
            entries.pop(WEIGHTS)
            entries.pop(AVERAGE, None)
    else:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        state = {names[id(p)]: dict(entries) for p, entries in optimizer.state.items()}
    return described(optimizer, state)


def by_name(replica: Replica) -> dict[str, dict[str, Any]]:
    """What servers know of every tensor."""
    assert replica.server_state is not None
    specs = replica.plan.specs
    return {specs[i].name: dict(entries) for i, entries in replica.server_state.fetch().items()}


def described(optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    kept = {name: entries for name, entries in state.items() if entries}
    return {"kind": kind_of(optimizer).__name__, "state": kept, "groups": groups}
