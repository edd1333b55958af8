"""``job.save`` and ``job.load``: gather what is spread, and spread what was gathered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import CheckpointError
from slipstream.runtime.joining import Membership
from slipstream.torch.averages import Averages
from slipstream.torch.checkpoint import (
    FORMAT,
    Checkpoint,
    check_fits,
    load_model,
    model_tensors,
    pack,
    random_state,
    restore_random_state,
    unpack,
)
from slipstream.torch.copying import copy_state
from slipstream.torch.inventory import whole_state
from slipstream.torch.replica import Replica
from slipstream.torch.shard_optimizer import AVERAGE, WEIGHTS
from slipstream.torch.staging import Staging

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
    write(path, tensors, state, averages, {**facts, "random": [random_state()]})


def take_weights(model: nn.Module, replica: Replica) -> None:
    """The servers' weights become the model's."""
    own = dict(whole_state(model))
    with torch.no_grad():
        for name, entries in by_name(replica).items():
            own[name].data.copy_(entries[WEIGHTS])


def write(
    path: Path,
    tensors: dict[str, torch.Tensor],
    optimizer: dict[str, Any],
    averages: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
) -> None:
    checkpoint = Checkpoint({**tensors, **{f"averaged/{n}": t for n, t in averages.items()}})
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
    return {"kind": kind_of(optimizer), "state": kept, "groups": groups}


def kind_of(optimizer: Optimizer) -> str:
    return type(getattr(optimizer, "local", optimizer)).__name__


def load_job(
    path: Path,
    occasion: str,
    model: nn.Module,
    optimizer: Optimizer,
    replica: Replica | None,
    membership: Membership | None,
    averages: Averages | None,
) -> int:
    """Rank 0 reads and checks; everybody ends with the same state. Returns the step."""
    checkpoint, problem = Checkpoint(), ""
    if membership is None or membership.env.rank == 0:
        try:
            checkpoint = Checkpoint.read(path)
            check_fits(model, checkpoint, path)
            check_optimizer_kind(optimizer, checkpoint, path)
            load_model(model, checkpoint)
        except CheckpointError as error:
            if membership is None:
                raise
            problem = str(error)
    if membership is not None and replica is not None:
        with replica.chain.opened():
            # Nobody sends before everybody would take it.
            membership.gathering.gather(f"{occasion}/begun", True, bool)
            share_outcome(membership, occasion, problem)
            whole = copy_state(replica.chain, model)
            checkpoint, rest = spread(checkpoint, occasion, replica, membership)
            if not all(membership.gathering.gather(f"{occasion}/whole", whole and rest, bool)):
                raise CheckpointError(f"a worker died while {path} was copied: load it again")
            if replica.residuals is not None:
                replica.residuals.restore(checkpoint.tensors)
    restore_optimizer(model, optimizer, checkpoint, replica, membership)
    if averages is not None:
        averages.load(averages_of(checkpoint))
    if membership is not None:
        # Rank 0's weights travel from their own memory: nobody trains before all have them.
        membership.gathering.gather(f"{occasion}/done", True, bool)
    rank = membership.env.rank if membership is not None else 0
    if rank < len(checkpoint.facts["random"]) and checkpoint.facts["random"][rank]:
        restore_random_state(checkpoint.facts["random"][rank])
    return int(checkpoint.facts["step"])


def check_optimizer_kind(optimizer: Optimizer, checkpoint: Checkpoint, path: Path) -> None:
    saved = unpack(checkpoint.facts["optimizer"], checkpoint.tensors)
    if saved["kind"] != kind_of(optimizer) or len(saved["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{path} holds the state of {saved['kind']} with {len(saved['groups'])} parameter "
            f"group(s); this job trains with {kind_of(optimizer)} and "
            f"{len(optimizer.param_groups)}"
        )


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
    saved = unpack(checkpoint.facts["optimizer"], checkpoint.tensors)
    for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(settings)
    if replica is not None and replica.server_state is not None:
        if membership is not None and membership.env.rank == 0:
            index = {spec.name: i for i, spec in enumerate(replica.plan.specs)}
            replica.server_state.send_weights()
            state = {index[name]: dict(entries) for name, entries in saved["state"].items()}
            for name, average in averages_of(checkpoint).items():
                state.setdefault(index[name], {})[AVERAGE] = average
            replica.server_state.restore(state)
            assert replica.service is not None
            replica.service.accounts()  # answered after all of it has come
        return
    by_name = dict(model.named_parameters())
    optimizer.state.clear()
    for name, entries in saved["state"].items():
        parameter = by_name[name]
        optimizer.state[parameter] = {
            key: placed(value, parameter) for key, value in entries.items()
        }


def averages_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The averaged weights in a checkpoint, by parameter's name; none if none were kept."""
    head = "averaged/"
    return {n.removeprefix(head): t for n, t in checkpoint.tensors.items() if n.startswith(head)}


def placed(value: Any, parameter: torch.Tensor) -> Any:
    """State of the parameter's shape lives where the parameter does; counters stay put."""
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return value.to(parameter.device)
    return value
