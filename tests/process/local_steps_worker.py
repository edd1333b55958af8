"""Trains with local steps and outer rounds, and writes down what must hold of it."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import digest
from forked_servers import start_servers_by_fork
from mix_worker import owed
from torch import Tensor, nn

import slipstream
from slipstream.systems import parse

STEPS, BATCH, INPUTS, HIDDEN, OUTPUTS, RATE = 12, 4, 24, 48, 16, 0.05


class Turned(nn.Module):
    """A layer with complex numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(HIDDEN, dtype=dtype.to_complex()))

    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = (self.turn * x).imag.tanh()
        return turned


def build(dtype: torch.dtype, kind: str = "plain", seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    hidden = nn.BatchNorm1d(HIDDEN) if kind == "norm" else nn.Tanh()
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), hidden, nn.Linear(HIDDEN, OUTPUTS)).to(dtype)
    if kind == "complex":
        model[1] = Turned(dtype)
    if kind == "turned":  # in memory, as torch.channels_last does to convolutions
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    for parameter in model[0].parameters() if kind == "frozen" else ():
        parameter.requires_grad = False
    return model


def batch(rank: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    samples = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(BATCH, INPUTS, generator=samples, dtype=torch.float64).to(dtype)
    return inputs, inputs[:, :OUTPUTS].sin()


def inner(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=RATE)


def weights(model: nn.Module) -> dict[str, Any]:
    return {name: real(p.detach()).tolist() for name, p in model.named_parameters()}


def real(values: Tensor) -> Tensor:
    return (torch.view_as_real(values) if values.is_complex() else values).double()


def step_once(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    of: tuple[int, int],
    factor: float | None = None,
) -> None:
    """One step on the batch of this rank and step.

    Args:
        factor: Of the loss, which a closure computes within the step; None: without a closure.
    """
    inputs, targets = batch(*of, next(model.parameters()).dtype)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets) * (1.0 if factor is None else factor)
        loss.backward()
        return loss

    if factor is not None:
        optimizer.step(closure)
        return
    closure()
    optimizer.step()


def misuse(job: slipstream.Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """What must not change lent weights; returns the errors."""
    said = []
    with job.outer_weights():
        lent = digest(model)
        job.wait()
        path = "lent.safetensors"
        for call in (job.flush, optimizer.step, partial(job.save, path), partial(job.load, path)):
            try:
                call()
            except slipstream.RuntimeFault as error:
                said.append(str(error))
        assert digest(model) == lent
    return said


class Breaking:
    """Makes one step leave weights that are not finite."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._done = model, False

    def once(self, *_: Any) -> None:
        if not self._done:
            self._done = True
            next(self._model.parameters()).data.fill_(math.nan)


class Moves:
    """The sum of what the optimizer's own steps did to each parameter."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self.total = {n: torch.zeros_like(real(p.detach())) for n, p in model.named_parameters()}
        self._before: dict[str, Tensor] = {}
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def as_lists(self) -> dict[str, Any]:
        return {name: total.tolist() for name, total in self.total.items()}

    def _begin(self, *_: Any) -> None:
        self._before = {n: p.detach().clone() for n, p in self._model.named_parameters()}

    def _end(self, *_: Any) -> None:
        for name, parameter in self._model.named_parameters():
            self.total[name] += real(parameter.detach()) - real(self._before[name])


def take_turns(folder: Path, rank: int, blocks: int) -> None:
    """Rank 2 is too late for the first rounds; rank 1 waits until what rank 2 did has counted."""
    before = {(2, 0): (1, 2), (1, 2): (2, 2)}.get((rank, blocks))
    deadline = time.monotonic() + 60
    while before is not None and not (folder / f"blocks-{before[0]}-{before[1]}").exists():
        assert time.monotonic() < deadline, f"rank {before[0]} has not made {before[1]} blocks"
        time.sleep(0.005)


def answer_of(job: Any) -> tuple[int, int] | tuple[None, None]:
    """Of this worker's last contribution: the round that answered it, and whether that dropped it.

    With several units, those of the largest tensor, which is not cut here. None where another
    worker speaks for the host.
    """
    channel = job._training.mode.parts[0].channels.links
    if channel is None:
        return None, None
    state = max(channel._states.values(), key=lambda state: sum(p.numel for p in state.unit.places))
    return state.committed - 1, int(state.covered[0] > 1)


def changed_alone(names: dict[str, list[str]], rank: int, model: nn.Module) -> list[Tensor]:
    """What this rank alone changes after its last step, as an optimizer's ``eval()`` may do."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [state[name] for name in names.get(str(rank), [])]


def recorded(
    wanted: dict[str, Any],
) -> AbstractContextManager[list[warnings.WarningMessage] | None]:
    """Warnings, where they are told of."""
    if "changed" not in wanted:
        return nullcontext()
    return warnings.catch_warnings(record=True)


def main(strategy: str, folder: str, dtype_name: str, options: str = "{}") -> None:
    start_servers_by_fork()
    dtype = getattr(torch, dtype_name)
    wanted = json.loads(options)
    kind = wanted.get("model", "plain")
    begun = weights(model := build(dtype, kind, wanted.get("seed", 3)))
    optimizer = inner(model, wanted.get("inner", "SGD"))
    moves = Moves(model, optimizer)  # before distribute, so that its hook runs before a merge
    nonfinite = wanted.get("nonfinite", "pass")
    with (
        recorded(wanted) as caught,
        slipstream.init(start_limit_s=60, wait_limit_s=60, nonfinite=nonfinite) as job,
    ):
        model, optimizer = job.distribute(model, optimizer, parse(strategy))
        if (path := wanted.get("load")) is not None:
            job.load(path)
        seed = wanted.get("load_state")
        if seed is not None and job.rank in wanted.get("load_on", [job.rank]):
            model.load_state_dict(build(dtype, kind, seed).state_dict())
        told: dict[str, Any] = {}
        if "load" in wanted:
            with job.outer_weights():
                told["loaded"] = digest(model)
            told["begins_with"] = digest(model)
        uneven = 2 * job.rank if wanted.get("uneven") else 0
        for step in job.steps(wanted.get("steps", STEPS) + uneven):
            told.setdefault("steps", []).append(step)
            data = 0 if wanted.get("alike") else job.rank
            if wanted.get("late"):
                blocks, within = divmod(len(told["steps"]) - 1, wanted["late"])
                if not within:
                    take_turns(Path(folder), job.rank, blocks)
            if wanted.get("broken") == [job.rank, step]:
                optimizer.register_step_pre_hook(Breaking(model).once)
            factor = 1.0 if wanted.get("closure") else None
            if wanted.get("endless") == [job.rank, step]:
                factor = math.inf
            step_once(model, optimizer, (data, step), factor)
            if step + 1 == wanted.get("misuse_after"):
                told["said"] = misuse(job, model, optimizer)
            if wanted.get("late") and len(told["steps"]) % wanted["late"] == 0:
                told.setdefault("blocks", []).append([*answer_of(job), moves.as_lists()])
                Path(folder, f"blocks-{job.rank}-{len(told['blocks'])}").touch()
            if step + 1 == wanted.get("save_after"):
                job.save(os.path.join(folder, "saved.safetensors"))
                with job.outer_weights():
                    told["saved"] = digest(model)
        for tensor in changed_alone(wanted.get("changed", {}), job.rank, model):
            tensor.data.mul_(0.5)
        job.wait()
        told |= {"own": digest(model), "stats": job.stats()}
        told["own_is_finite"] = all(bool(p.isfinite().all()) for p in model.parameters())
        names = [spec.name for spec in job.plan.specs]
        told["fragments"] = [[names[t] for t in tensors] for tensors in job.plan.fragments]
        if not wanted.get("plain"):
            with job.outer_weights():
                told |= {"outer": digest(model), "outer_before": weights(model)}
        if wanted.get("flush", True):
            job.flush()
        told |= {"owed": owed(job), "flushed": weights(model)}
    told["warned"] = [str(warning.message) for warning in caught or ()]
    told |= {"digest": digest(model), "begun": begun, "weights": weights(model)}
    told["moved"] = moves.as_lists()
    Path(folder, f"{job.rank}.json").write_text(json.dumps(told, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
