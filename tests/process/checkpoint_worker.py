"""Trains parts of a run, one job each, between checkpoints; writes down what every step led to."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cases import OPTIMIZERS, digest, state_of
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream

BATCH, INPUTS, OUTPUTS = 12, 16, 4


class Rich(nn.Module):
    """Every kind of tensor a checkpoint has to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(INPUTS, INPUTS).requires_grad_(False)
        self.first = nn.Linear(INPUTS, 64)
        self.norm = nn.BatchNorm1d(64)
        self.brain = nn.Linear(64, OUTPUTS, dtype=torch.bfloat16)
        self.precise = nn.Linear(64, OUTPUTS, dtype=torch.float64)
        self.turned = nn.Parameter(torch.randn(OUTPUTS, 64).t() / 8)
        self.complex = nn.Parameter(torch.randn(OUTPUTS, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.never = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(self.frozen(inputs))))
        parts = [self.brain(hidden.bfloat16()).float(), self.precise(hidden.double()).float()]
        parts.append((hidden @ self.turned) * (self.complex * self.complex.conj()).real)
        return torch.stack(parts).sum(0) * self.scale + self.nothing.sum()


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, OUTPUTS))


MODELS = {"rich": Rich, "plain": plain}


def batch(step: int, rank: int, world: int, noisy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the step's samples; noise comes from every generator there is."""
    generator = torch.Generator().manual_seed(step)
    both = torch.randn(BATCH, INPUTS + OUTPUTS, generator=generator)[rank::world]
    inputs, targets = both[:, :INPUTS], both[:, INPUTS:]
    if noisy:
        level = random.random() + np.random.rand()  # noqa: NPY002  # the one users seed
        inputs = inputs + 0.1 * level * torch.randn_like(inputs)
    return inputs, targets


def train(asked: dict[str, Any]) -> dict[str, Any]:
    kind = asked["optimizer"]
    told: dict[str, Any] = {"digests": {}, "errors": []}
    with slipstream.init(servers=asked["servers"], start_limit_s=30, wait_limit_s=60) as job:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 + job.rank)
        model: nn.Module = MODELS[asked["model"]]()
        optimizer: torch.optim.Optimizer = OPTIMIZERS[kind][0](list(model.parameters()))
        model, optimizer = job.distribute(model, optimizer, asked["strategy"])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        if asked["load"]:
            job.load(asked["load"])
            scheduler.load_state_dict(json.loads(Path(asked["load"] + ".schedule").read_text()))
        for bad in asked["bad"]:
            told["errors"].append(attempt(job.load, bad))
        for step in range(job.step, asked["until"]):
            optimizer.zero_grad()
            inputs, targets = batch(step, job.rank, job.world_size, asked["model"] == "rich")
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
            if job.step in asked["save"]:
                path = asked["save"][job.step]
                job.save(path)
                if job.rank == 0:
                    Path(path + ".schedule").write_text(json.dumps(scheduler.state_dict()))
            job.wait()
            told["digests"][job.step] = digest(model)
        if asked["cannot_write"]:
            before = Path(asked["cannot_write"]).read_bytes()
            told["errors"].append(fail_to_write(job, asked["cannot_write"]))
            told["kept"] = Path(asked["cannot_write"]).read_bytes() == before
        told["lr"] = optimizer.param_groups[0]["lr"]
        told["state"] = {k: v.tolist() for k, v in state_of(model).items() if not v.is_complex()}
    return told


def attempt(action: Any, path: str) -> str:
    try:
        action(path)
    except slipstream.ConfigError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fail_to_write(job: Any, path: str) -> str:
    """The disk is full, as far as this process can tell."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        return attempt(job.save, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def main() -> None:
    rank = os.environ["RANK"]
    start_servers_by_fork()
    for asked in json.loads(Path(sys.argv[1]).read_text()):
        asked["save"] = {int(step): path for step, path in asked["save"].items()}
        try:
            told = train(asked)
        except Exception:
            told = {"error": traceback.format_exc()}
        Path(f"{asked['name']}.{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
