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
from functools import partial
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
        if asked["copies"] and step in (1, 3, 6):
            trouble += evaluate_others(job, model, optimizer, asked["exact"])
    job.wait()
    return {"trouble": trouble, "digest": digest(model)}


def evaluate_others(
    job: slipstream.Job, model: nn.Module, optimizer: torch.optim.Optimizer, exact: bool
) -> list[str]:
    """Other weights for an evaluation, which must leave nothing behind; returns what is wrong."""
    job.wait()
    before, found = digest(model), []
    with job.swapped_weights():
        if exact and digest(model) != before:
            found.append("the block begins with other weights")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(1)
        model.norm.running_mean = torch.ones_like(model.norm.running_mean)
        loss_of(model.eval(), 0, 0)
        model.train()
        others = digest(model)
        for call in (optimizer.step, partial(job.save, "nowhere"), partial(job.load, "nowhere")):
            try:
                call()
            except slipstream.RuntimeFault as error:
                if "within job.swapped_weights()" not in str(error):
                    found.append(str(error))
            else:
                found.append(f"{call} is possible")
        job.wait()
        if digest(model) != others:
            found.append("the block has not kept other weights")
    if exact and digest(model) != before:
        found.append("the block has left other weights behind")
    return found


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


# ---- the script's own checkpoints


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
}


def checkpointed(job: slipstream.Job, asked: Asked) -> Asked:
    """Trains from ``begin`` to ``end``; saves and loads with torch alone, as scripts do."""
    path, when = Path(asked["file"]), asked["when"]
    model = net()
    optimizer = OPTIMIZERS[asked["optimizer"]](model.parameters())

    def resume() -> None:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    if when == "before":
        resume()
    model, optimizer = job.distribute(model, optimizer, asked["strategy"])
    if when == "after":
        resume()
    for step in range(asked["begin"], asked["end"]):
        step_alone(model, optimizer, step, job.rank)
        job.wait()  # a learner sees all of its updates
    state = optimizer.state_dict()
    if job.rank == 0 and when == "never":
        torch.save({"model": model.state_dict(), "optimizer": state}, path)
    kept = {
        str(number): {
            key: float(torch.as_tensor(value).double().sum()) for key, value in entries.items()
        }
        for number, entries in state["state"].items()
    }
    shapes = [list(p.shape) for p in model.parameters()]
    fits = all(
        list(entry.shape) in ([], shapes[number])
        for number, entries in state["state"].items()
        for entry in entries.values()
        if isinstance(entry, torch.Tensor)
    )
    return {"digest": digest(model), "state": kept, "fits": fits}


def averaged(job: slipstream.Job, asked: Asked) -> Asked:
    """Loads other weights, before or after job.distribute."""
    model = net()
    trained = {name: tensor + 100 for name, tensor in state_of(model).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if asked["when"] == "before":
        model.load_state_dict(trained)
    model, optimizer = job.distribute(model, optimizer, asked["strategy"])
    if asked["when"] == "after":
        model.load_state_dict(trained)
    for step in range(asked["steps"]):
        step_alone(model, optimizer, step, job.rank)
    with job.averaged_weights():
        averages = digest(model)
    return {"averages": averages}


# ---- what a loop does around its steps


class Touch:
    """One thing that a loop does; the reference does the same with each rank's own gradients."""

    passes = 1

    def gradients(self, model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
        """Backward passes, and what the loop makes of the gradients."""
        for number in range(self.passes):
            loss_of(model, step + 1000 * number, rank).backward()

    def advance(self, model: nn.Module, optimizer: Any) -> None:
        optimizer.step()

    def finish(self, model: nn.Module) -> None:
        """After the step."""


class TwoPasses(Touch):
    passes = 2


class TwoPassesLater(Touch):
    """In its first step with two passes, the gradients of the first have already left."""

    begin = 5
    counted_then = 2

    def gradients(self, model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
        later = self.counted_then if step == self.begin else 2
        self.passes = later if step >= self.begin else 1
        super().gradients(model, optimizer, step, rank)


class OneOfTwoPassesThen(TwoPassesLater):
    """What counts of it."""

    counted_then = 1


class Clipped(Touch):
    begin = 0

    def gradients(self, model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
        super().gradients(model, optimizer, step, rank)
        if step >= self.begin:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)


class ClippedLater(Clipped):
    begin = 5


class ClampedData(Touch):
    """In a way that autograd does not count."""

    def gradients(self, model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
        super().gradients(model, optimizer, step, rank)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data.clamp_(-0.001, 0.001)


class Scheduled(Touch):
    """The rate changes after the backward pass."""

    def gradients(self, model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
        super().gradients(model, optimizer, step, rank)
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)


class Scaled(Touch):
    """Rank 1 finds an infinity once, and makes that step without gradients."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def gradients(self, model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
        loss = loss_of(model, step, rank)
        if (step, rank) == (4, 1):
            loss = loss * torch.inf
        self.scaler.scale(loss).backward()

    def advance(self, model: nn.Module, optimizer: Any) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()


class ScaledAndClipped(Scaled):
    def gradients(self, model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
        super().gradients(model, optimizer, step, rank)
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)


class Constrained(Touch):
    def finish(self, model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)


class ConstrainedData(Touch):
    """By ``.data``, of whose changes autograd keeps no count."""

    def finish(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)


TOUCHES = {
    kind.__name__: kind
    for kind in (
        Touch, TwoPasses, TwoPassesLater, OneOfTwoPassesThen, Clipped, ClippedLater, ClampedData,
        Scheduled, Scaled, ScaledAndClipped, Constrained, ConstrainedData,
    )
}  # fmt: skip


def touching(job: slipstream.Job, asked: Asked) -> Asked:
    model, touch = net(), TOUCHES[asked["touch"]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    model, optimizer = job.distribute(model, optimizer, asked["strategy"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            optimizer.zero_grad()
            touch.gradients(model, optimizer, step, job.rank)
            touch.advance(model, optimizer)
            touch.finish(model)
    job.wait()
    if job.rank == 0:
        torch.save(model.state_dict(), asked["file"])
    return {"warned": [str(warning.message) for warning in caught], "steps": job.step}


def reference(kind: str, workers: int) -> dict[str, torch.Tensor]:
    """The weights after the same steps in one process, of the mean of workers' gradients."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    touches = [TOUCHES[kind]() for _ in range(workers)]
    for step in range(STEPS):
        gradients = []
        for rank, touch in enumerate(touches):
            optimizer.zero_grad()
            touch.gradients(model, optimizer, step, rank)
            gradients.append(own_gradients(model, touch))
        for parameter, each in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = torch.stack(each).mean(0)
        optimizer.step()
        touches[0].finish(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def own_gradients(model: nn.Module, touch: Touch) -> list[torch.Tensor]:
    """A worker's gradients as it sends them."""
    trained = list(model.parameters())
    gradients = [p.grad.clone() for p in trained if p.grad is not None]
    assert len(gradients) == len(trained)
    if isinstance(touch, Scaled):
        scale = touch.scaler.get_scale() if not isinstance(touch, ScaledAndClipped) else 1.0
        finite = all(bool(g.isfinite().all()) for g in gradients)
        held = torch.optim.SGD(trained, lr=0.0)  # the scaler notes an infinity by optimizer
        if not isinstance(touch, ScaledAndClipped):
            touch.scaler.unscale_(held)
            touch.scaler.step(held)
        touch.scaler.update()
        return [g / scale if finite else torch.zeros_like(g) for g in gradients]
    return gradients


def constrained_critic(job: slipstream.Job, asked: Asked) -> Asked:
    """Two pairs, as in a GAN whose critic's weights are clamped after each of its steps."""
    torch.manual_seed(4)
    generator, critic = nn.Linear(3, INPUTS), nn.Linear(INPUTS, 1)
    trained = [
        (model, torch.optim.RMSprop(model.parameters(), lr=0.01)) for model in (critic, generator)
    ]
    (critic, of_critic), (generator, of_generator) = job.distribute(trained, asked["strategy"])
    for step in range(STEPS):
        noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + job.rank))
        for _ in range(2):
            of_critic.zero_grad()
            (
                critic(generator(noise).detach()).mean() - critic(torch.ones(4, INPUTS)).mean()
            ).backward()
            nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
            of_critic.step()
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.05, 0.05)
        of_generator.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        of_generator.step()
    largest = max(float(p.detach().abs().max()) for p in critic.parameters())
    job.wait()
    return {"digest": digest(critic) + digest(generator), "largest": largest}


KINDS = {
    "copies": copies,
    "checkpointed": checkpointed,
    "averaged": averaged,
    "touching": touching,
    "constrained critic": constrained_critic,
}


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
