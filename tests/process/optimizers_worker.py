"""What loops do with their optimizer, a job each, as the plan says: PLAN FOLDER.

Every rank writes what it saw, or the error that ended its loop. ``alone`` is the same loop in one
process, on the mean of all workers' gradients.
"""

from __future__ import annotations

import json
import os
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream

WORKERS, STEPS = 2, 7  # more than the steps in which gradients leave at step()
Numbers = list[float]
Optimizer = torch.optim.Optimizer


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def weights(model: nn.Module) -> Numbers:
    """As an evaluation by hand reads them."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    numbers: Numbers = flat.tolist()
    return numbers


class Loop:
    """One process of a job, or all of it."""

    def __init__(self, job: slipstream.Job | None, strategy: str = "") -> None:
        self.job, self.strategy = job, strategy
        torch.manual_seed(1)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def distribute(self, optimizer: Optimizer) -> Any:
        if self.job is None:
            return optimizer
        self.model, optimizer = self.job.distribute(self.model, optimizer, self.strategy)
        return optimizer

    def loss(self, step: int) -> torch.Tensor:
        ranks = range(WORKERS) if self.job is None else [self.job.rank]
        seeds = [torch.Generator().manual_seed(10 * step + rank) for rank in ranks]
        data = torch.cat([torch.randn(6, 4, generator=seed) for seed in seeds])
        loss: torch.Tensor = self.model(data).square().mean()
        return loss

    def backward(self, optimizer: Optimizer, step: int) -> None:
        optimizer.zero_grad()
        self.loss(step).backward()

    def train(self, optimizer: Optimizer, first: int = 0, last: int = STEPS) -> None:
        for step in range(first, last):
            self.backward(optimizer, step)
            optimizer.step()

    def check_steps(self) -> None:
        if self.job is not None and self.job.step != STEPS:
            raise AssertionError(f"{self.job.step} steps were counted")

    def wait(self) -> None:
        if self.job is not None:
            self.job.wait()


# ---- hooks, and a replaced step


def halve(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def hooks(loop: Loop) -> Any:
    """A pre-hook changes gradients, late; post-hooks on either object read the step's weights."""
    optimizer, seen = sgd(loop.model), [[], []]

    def halve_later(optimizer: Optimizer, *_: Any) -> None:
        if len(seen[0]) >= 5:  # where no hook ran, gradients would leave in backward by now
            halve(optimizer)

    optimizer.register_step_pre_hook(halve_later)
    optimizer.register_step_post_hook(lambda *_: seen[0].append(weights(loop.model)))
    optimizer = loop.distribute(optimizer)
    optimizer.register_step_post_hook(lambda *_: seen[1].append(weights(loop.model)))
    loop.train(optimizer)
    loop.wait()  # workers that run ahead apply their last update late
    return seen


def hooks_of_scaled(loop: Loop) -> Any:
    """A pre-hook sees gradients without the scale of a ``GradScaler``."""
    optimizer, norms = sgd(loop.model), []

    def note(optimizer: Optimizer, *_: Any) -> None:
        given = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(sum(gradient.square().sum() for gradient in given)))

    optimizer.register_step_pre_hook(note)
    optimizer = loop.distribute(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loop.loss(step)).backward()
        scaler.step(optimizer)
        scaler.update()
    loop.wait()
    return [norm < 100.0 for norm in norms]


def replaced(loop: Loop) -> Any:
    """``optimizer.step`` is another function, which calls the one before."""
    optimizer = sgd(loop.model)
    before = optimizer.step

    def step(closure: Any = None) -> Any:
        halve(optimizer)
        return before(closure)

    optimizer.step = step
    loop.train(loop.distribute(optimizer))
    loop.check_steps()
    return weights(loop.model)


def replaced_wholly(loop: Loop) -> Any:
    """It makes the step itself."""
    optimizer = sgd(loop.model)

    def step(optimizer: Optimizer, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter -= 0.1 * parameter.grad

    optimizer.step = types.MethodType(step, optimizer)
    optimizer = loop.distribute(optimizer)
    torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    loop.train(optimizer)
    loop.check_steps()
    return weights(loop.model)


def scheduled(loop: Loop) -> Any:
    """A scheduler that was made before ``job.distribute`` wraps ``step``, as torch's do."""
    optimizer = sgd(loop.model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer = loop.distribute(optimizer)
    for step in range(STEPS):
        loop.train(optimizer, step, step + 1)
        scheduler.step()
    return weights(loop.model)


# ---- other optimizers


def second_phase(loop: Loop) -> Any:
    """A new optimizer, which was not distributed."""
    optimizer = loop.distribute(sgd(loop.model))
    loop.train(optimizer, 0, 4)
    loop.wait()
    loop.train(torch.optim.SGD(loop.model.parameters(), lr=0.05), 4)
    return weights(loop.model)


class Around(Optimizer):
    """A wrapper that averages weights with older ones, as Lookahead does."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.steps = inner, 0
        super().__init__(inner.param_groups, {})
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.steps += 1
        if self.steps % 3 == 0:
            follow(self.param_groups, self.slow)


@torch.no_grad()
def follow(groups: Any, slow: list[torch.Tensor]) -> None:
    trained = [p for group in groups for p in group["params"]]
    for parameter, before in zip(trained, slow, strict=True):
        before.lerp_(parameter, 0.5)
        parameter.copy_(before)


def wrapped(loop: Loop) -> Any:
    """A wrapper is distributed, whose inner optimizer steps the same parameters."""
    loop.train(loop.distribute(Around(sgd(loop.model))))
    loop.check_steps()
    return weights(loop.model)


def wrapping(loop: Loop) -> Any:
    """The inner optimizer is distributed, and then wrapped."""
    loop.train(Around(loop.distribute(sgd(loop.model))))
    return weights(loop.model)


class Lookahead(Optimizer):
    """As public ones are: without ``super().__init__``, settings and hooks."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.counter = optimizer, 0
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.counter += 1
        if self.counter % 3 == 0:
            follow(self.param_groups, self.slow)


def lookahead(loop: Loop) -> Any:
    optimizer = loop.distribute(Lookahead(sgd(loop.model)))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        loop.train(optimizer, step, step + 1)
        scheduler.step()
    loop.check_steps()
    return weights(loop.model)


class Stateless(Lookahead):
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def stateless(loop: Loop) -> Any:
    loop.distribute(Stateless(sgd(loop.model)))


# ---- attributes and methods of the user's optimizer


class Switched(torch.optim.SGD):
    """Has two modes; ``evaluate`` changes weights, ``train`` and ``report`` do not."""

    rho = 0.05

    def train(self) -> str:
        return "trains"

    def report(self) -> float:
        return self.rho

    @torch.no_grad()
    def evaluate(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5)


def switched(loop: Loop) -> Switched:
    optimizer: Switched = loop.distribute(Switched(loop.model.parameters(), lr=0.1))
    return optimizer


def attributes(loop: Loop) -> Any:
    optimizer = switched(loop)
    loop.train(optimizer)
    before = optimizer.rho
    optimizer.rho = 0.5
    return [optimizer.train(), before, optimizer.report()]


def changing_method(loop: Loop) -> Any:
    optimizer = switched(loop)
    loop.train(optimizer)
    optimizer.evaluate()


# ---- weights by hand, and the state


def average(loop: Loop) -> Any:
    """An average of weights, read right after ``step()``."""
    optimizer = loop.distribute(sgd(loop.model))
    kept = [parameter.detach().clone() for parameter in loop.model.parameters()]
    for step in range(STEPS):
        loop.train(optimizer, step, step + 1)
        with torch.no_grad():
            for mean, parameter in zip(kept, loop.model.parameters(), strict=True):
                mean.mul_(0.5).add_(parameter, alpha=0.5)
        loop.model.zero_grad()
    return [mean.flatten().tolist() for mean in kept]


def vector(loop: Loop) -> Any:
    """``vector_to_parameters`` gives parameters other memory, late and without a version."""
    optimizer = loop.distribute(sgd(loop.model))
    loop.train(optimizer, 0, 5)
    trained = list(loop.model.parameters())  # read now, written later
    flat = nn.utils.parameters_to_vector(trained).detach()
    nn.utils.vector_to_parameters(flat.clamp(-0.2, 0.2), trained)
    loop.train(optimizer, 5)
    return weights(loop.model)


def clamped_late(loop: Loop) -> Any:
    """Through ``.data``, from a later step on."""
    optimizer = loop.distribute(sgd(loop.model))
    for step in range(STEPS):
        loop.train(optimizer, step, step + 1)
        if step >= 4:
            for parameter in loop.model.parameters():
                parameter.data.clamp_(-0.2, 0.2)
    return weights(loop.model)


def read_nan(loop: Loop) -> Any:
    """Weights that are NaN, and read after each step, have not changed since."""
    optimizer = loop.distribute(sgd(loop.model))
    for step in range(STEPS):
        optimizer.zero_grad()
        (loop.loss(step) * float("nan")).backward()
        optimizer.step()
        found = weights(loop.model)
    return [number != number for number in found]


def cleared(loop: Loop) -> Any:
    """Momentum begins anew after four steps."""
    optimizer = loop.distribute(sgd(loop.model))
    loop.train(optimizer, 0, 4)
    optimizer.state.clear()
    loop.train(optimizer, 4)
    return weights(loop.model)


def new_state(loop: Loop) -> Any:
    optimizer = loop.distribute(sgd(loop.model))
    loop.train(optimizer, 0, 4)
    optimizer.state = defaultdict(dict)
    loop.train(optimizer, 4)
    return weights(loop.model)


def state_by_hand(loop: Loop) -> Any:
    optimizer = loop.distribute(sgd(loop.model))
    loop.train(optimizer, 0, 4)
    for parameter in loop.model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    loop.train(optimizer, 4)
    return weights(loop.model)


HABITS: dict[str, Callable[[Loop], Any]] = {
    habit.__name__: habit
    for habit in (
        hooks, hooks_of_scaled, replaced, replaced_wholly, scheduled, second_phase, wrapped,
        wrapping, lookahead, stateless, attributes, changing_method, average, vector,
        clamped_late, read_nan, cleared, new_state, state_by_hand,
    )
}  # fmt: skip


def alone(habit: str) -> Any:
    return HABITS[habit](Loop(None))


def main() -> None:
    plan, folder, rank = Path(sys.argv[1]), Path(sys.argv[2]), os.environ.get("RANK", "0")
    warnings.simplefilter("error")
    for number, (strategy, habit) in enumerate(json.loads(plan.read_text())):
        told: dict[str, Any] = {}
        try:
            warnings.filterwarnings("ignore", ".*is not finite")
            with slipstream.init(wait_limit_s=120) as job:
                loop = Loop(job, strategy)
                told["seen"] = HABITS[habit](loop)
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        told["weights"] = weights(loop.model)
        (folder / f"{number}.{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    start_servers_by_fork()
    main()
