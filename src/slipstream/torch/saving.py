"""``job.save`` and ``job.load``: gather what is spread, and spread what was gathered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import CheckpointError
from slipstream.runtime.joining import Membership
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
from slipstream.torch.replica import Replica, copy_state
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
) -> None:
    """Rank 0 writes everything; all ranks leave together, with the same error if there is one."""
    generators = [random_state()]
    if membership is not None:
        generators = membership.rendezvous.gather(f"{occasion}/random", generators[0], dict)
    problem = ""
    if membership is None or membership.env.rank == 0:
        try:
            checkpoint = Checkpoint(model_tensors(model))
            checkpoint.facts = {
                "format": FORMAT,
                **facts,
                "random": generators,
                "optimizer": pack(
                    optimizer_state(model, optimizer, replica), "optimizer", checkpoint.tensors
                ),
            }
            checkpoint.write(path)
        except CheckpointError as error:
            if membership is None:
                raise
            problem = str(error)
    if membership is not None:
        share_outcome(membership, occasion, problem)


def share_outcome(membership: Membership, occasion: str, problem: str) -> None:
    """Rank 0's success or failure becomes everybody's."""
    if membership.env.rank == 0:
        membership.rendezvous.post(f"{occasion}/outcome", problem)
    said = membership.rendezvous.read(f"{occasion}/outcome", 0, str)
    if said:
        raise CheckpointError(said)


def optimizer_state(
    model: nn.Module, optimizer: Optimizer, replica: Replica | None
) -> dict[str, Any]:
    """State by parameter name, wherever it lives, and the groups' settings."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if replica is not None and replica.server_state is not None:
        fetched = replica.server_state.fetch()
        specs = replica.plan.specs
        state: dict[str, Any] = {specs[i].name: entries for i, entries in fetched.items()}
    else:
        state = {names[id(p)]: dict(entries) for p, entries in optimizer.state.items()}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"kind": kind_of(optimizer), "state": state, "groups": groups}


def kind_of(optimizer: Optimizer) -> str:
    return type(getattr(optimizer, "local", optimizer)).__name__


def load_job(
    path: Path,
    occasion: str,
    model: nn.Module,
    optimizer: Optimizer,
    replica: Replica | None,
    membership: Membership | None,
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
            membership.rendezvous.gather(f"{occasion}/begun", True, bool)
            share_outcome(membership, occasion, problem)
            copy_state(replica.chain, model)
            checkpoint = spread(checkpoint, occasion, replica, membership)
    restore_optimizer(model, optimizer, checkpoint, replica, membership)
    if membership is not None:
        # Rank 0's weights travel from their own memory: nobody trains before all have them.
        membership.rendezvous.gather(f"{occasion}/done", True, bool)
    rank = membership.env.rank if membership is not None else 0
    if rank < len(checkpoint.facts["random"]):
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
) -> Checkpoint:
    """Everything but the model, from rank 0 to all."""
    rendezvous, rank = membership.rendezvous, membership.env.rank
    if rank == 0:
        rest = {n: t for n, t in checkpoint.tensors.items() if not n.startswith("model/")}
        shapes = [[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in rest.items()]
        rendezvous.post(f"{occasion}/rest", [shapes, checkpoint.facts])
    else:
        shapes, facts = rendezvous.read(f"{occasion}/rest", 0, list[Any])
        rest = {n: torch.empty(shape, dtype=getattr(torch, kind)) for n, shape, kind in shapes}
        checkpoint = Checkpoint(facts=facts)
    staging = Staging()
    replica.chain.run([staging.writable(key, t) for key, t in enumerate(rest.values())])
    checkpoint.tensors.update(rest)
    return checkpoint


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
            replica.server_state.restore(
                {index[name]: entries for name, entries in saved["state"].items()}
            )
        return
    by_name = dict(model.named_parameters())
    optimizer.state.clear()
    for name, entries in saved["state"].items():
        parameter = by_name[name]
        optimizer.state[parameter] = {
            key: placed(value, parameter) for key, value in entries.items()
        }


def placed(value: Any, parameter: torch.Tensor) -> Any:
    """State of the parameter's shape lives where the parameter does; counters stay put."""
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return value.to(parameter.device)
    return value
