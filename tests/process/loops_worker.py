"""Ordinary training loops, a job each, as the plan says: PLAN FOLDER. Ranks write what they saw."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from forked_servers import start_servers_by_fork
from torch import nn
from torch.optim.swa_utils import AveragedModel

import slipstream

INPUTS, OUTPUTS, WORDS, STEPS = 12, 4, 20, 8
Asked = dict[str, Any]


class Net(nn.Module):
    """A table, a layer whose gradient may be sent as factors, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, INPUTS)
        self.wide = nn.Linear(INPUTS, 128)
        self.norm = nn.BatchNorm1d(128)
        self.out = nn.Linear(128, OUTPUTS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(torch.tanh(self.wide(self.words(ids)))))
        return out


SAFE = [Net, nn.Embedding, nn.Linear, nn.BatchNorm1d]


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(WORDS, (6,), generator=generator)
    return F.mse_loss(model(ids), torch.randn(6, OUTPUTS, generator=generator))


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def digest(model: nn.Module) -> str:
    state = b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())
    return hashlib.sha256(state).hexdigest()


def saved_whole(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals(SAFE):
        loaded: nn.Module = torch.load(file, weights_only=True)
    return loaded


# ---- copies of models


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": saved_whole,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "averaged": lambda model: AveragedModel(model, use_buffers=True).module,
}


def copies(job: slipstream.Job, asked: Asked) -> Asked:
    model = net()
    plain = {name: sorted(vars(module)) for name, module in model.named_modules()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    model, optimizer = job.distribute(model, optimizer, asked["strategy"])
    trouble = []
    for step in range(STEPS):
        step_alone(model, optimizer, step, job.rank)
        for how, copied in COPIES.items() if asked["copies"] and step in (2, 5) else ():
            with_all = copied(model)
            if asked["exact"] and digest(with_all) != digest(model):
                trouble.append(f"{how}: another state")
            trouble += [f"{how}: {what}" for what in faults_of(with_all, plain)]
    job.wait()
    return {"trouble": trouble, "digest": digest(model)}


def faults_of(copied: nn.Module, plain: dict[str, list[str]]) -> list[str]:
    """What is wrong with a copy; it is trained by itself, which must not reach the model."""
    found = []
    for name, module in copied.named_modules():
        if sorted(vars(module)) != plain[name]:
            found.append(f"{name} has {sorted(set(vars(module)) ^ set(plain[name]))}")
        for attribute, hooks in vars(module).items():
            if "hooks" in attribute and hooks:
                found.append(f"{name}.{attribute} is {dict(hooks)}")
    own = torch.optim.SGD(copied.parameters(), lr=0.1)
    before = state_of(copied)
    for step in range(2):
        own.zero_grad()
        loss_of(copied, step, 0).backward()
        found += [f"{n} is sparse" for n, p in copied.named_parameters() if p.grad.is_sparse]
        own.step()
    if all(torch.equal(before[name], tensor) for name, tensor in state_of(copied).items()):
        found.append("it does not train")
    return found


KINDS = {"copies": copies}


def main() -> None:
    plan, folder, rank = Path(sys.argv[1]), Path(sys.argv[2]), os.environ.get("RANK", "0")
    warnings.simplefilter("error")
    for number, asked in enumerate(json.loads(plan.read_text())):
        try:
            with slipstream.init(servers=asked.get("servers"), wait_limit_s=120) as job:
                told = KINDS[asked["kind"]](job, asked)
        except Exception:
            told = {"error": traceback.format_exc()}
        (folder / f"{number}.{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    start_servers_by_fork()
    main()
