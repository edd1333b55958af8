"""What a training loop does besides training, one habit a job: HABIT SYSTEM FOLDER.

Every rank writes what it has in the end. ``alone`` is the same loop in one process, on the union of
all workers' batches.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked_servers import start_servers_by_fork
from habit_systems import System, system_of
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import slipstream

WORKERS, STEPS = 2, 7  # more than the steps in which gradients leave at step()
LATE = 4  # the step after which loops do what they do once
INPUTS, WIDTH, OUTPUTS, BATCH = 12, 96, 4, 4
SHIFT = 0.25
Numbers = list[float]
Optimizer = torch.optim.Optimizer


class Net(nn.Module):
    """Two layers, of which one may be sent as factors.

    Args:
        chained: One after the other. Else beside each other, so that gradients do not depend on
            the weights: the sum of all updates is the same then, in whichever order they come.
    """

    def __init__(self, chained: bool) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        self.chained = chained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.chained:
            out: torch.Tensor = self.head(torch.tanh(self.wide(x)))
            return out
        return self.wide(x)[:, :OUTPUTS] + self.wide(-x).sum(1, True) + self.head(spread(x))


class Pictures(nn.Module):
    """A convolution."""

    def __init__(self, chained: bool) -> None:
        super().__init__()
        self.wide, self.head = nn.Conv2d(3, WIDTH, 2), nn.Linear(WIDTH, OUTPUTS)
        self.chained = chained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = self.wide(x.view(-1, 3, 2, 2)).flatten(1)
        out: torch.Tensor
        if self.chained:
            out = self.head(torch.tanh(maps))
        else:
            out = maps.sum(1, True) + self.head(spread(x))
        return out


def spread(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(1, WIDTH // INPUTS)


def weights(model: nn.Module) -> Numbers:
    """As an evaluation by hand reads them."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    numbers: Numbers = flat.tolist()
    return numbers


class Loop:
    """One process of a job, or all of it.

    Attributes:
        begun: The weights at first.
        seen: What the loop has seen, which is the same in a job and in one process.
        seen_in_step: The same, where workers have the same weights after every step.
    """

    def __init__(self, job: slipstream.Job | None, system: System, folder: Path) -> None:
        self.job, self.system, self.folder = job, system, folder
        self.seen: list[Any] = []
        self.seen_in_step: list[Any] = []
        self.model = self.new(Net)

    def new(self, kind: Callable[[bool], nn.Module]) -> Any:
        torch.manual_seed(1)
        model = kind(self.system.in_step).to(self.system.dtype)
        self.begun = weights(model)
        return model

    @property
    def rank(self) -> int:
        return 0 if self.job is None else self.job.rank

    def sgd(self, model: nn.Module | None = None) -> Optimizer:
        momentum = 0.5 if self.system.in_step else 0.0
        return torch.optim.SGD((model or self.model).parameters(), lr=0.1, momentum=momentum)

    def distribute(self, optimizer: Optimizer) -> Any:
        if self.job is None:
            return optimizer
        self.model, optimizer = self.job.distribute(self.model, optimizer, self.system.strategy)
        return optimizer

    def loss(self, step: int) -> torch.Tensor:
        ranks = range(WORKERS) if self.job is None else [self.job.rank]
        seeds = [torch.Generator().manual_seed(10 * step + rank) for rank in ranks]
        drawn = [torch.randn(BATCH, INPUTS + OUTPUTS, generator=seed) for seed in seeds]
        x, target = torch.cat(drawn).to(self.system.dtype).split([INPUTS, OUTPUTS], 1)
        out = self.model(x)
        if self.system.in_step:
            return (out - target).square().mean()
        return (out * target).mean() * (self.system.updates_a_step if self.job is None else 1)

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


# ---- parameters that the loop replaces, or writes


def shift(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + SHIFT


def replaced_before(loop: Loop) -> None:
    """``p.data = other``, before the first step."""
    optimizer = loop.distribute(loop.sgd())
    shift(loop.model)
    loop.train(optimizer)


def replaced_after(loop: Loop) -> None:
    """``p.data = other`` between two steps."""
    optimizer = loop.distribute(loop.sgd())
    loop.train(optimizer, 0, LATE)
    shift(loop.model)
    loop.train(optimizer, LATE)


def cloned(loop: Loop) -> None:
    """``weight.data = weight.data.clone()``, the same values in other memory."""
    optimizer = loop.distribute(loop.sgd())
    loop.train(optimizer, 0, LATE)
    loop.model.wide.weight.data = loop.model.wide.weight.data.clone()
    loop.train(optimizer, LATE)


def vector(loop: Loop) -> None:
    """``vector_to_parameters``, with a list of parameters that was made before."""
    optimizer = loop.distribute(loop.sgd())
    trained = list(loop.model.parameters())
    loop.train(optimizer, 0, LATE)
    vector_to_parameters(parameters_to_vector(trained).detach() + SHIFT, trained)
    loop.train(optimizer, LATE)


def vector_listed_late(loop: Loop) -> None:
    """The list is made then, and used later."""
    optimizer = loop.distribute(loop.sgd())
    loop.train(optimizer, 0, LATE)
    trained = list(loop.model.parameters())
    vector_to_parameters(parameters_to_vector(trained).detach() + SHIFT, trained)
    loop.train(optimizer, LATE)


def vector_after_wait(loop: Loop) -> None:
    """``vector_to_parameters`` after ``job.wait()``."""
    optimizer = loop.distribute(loop.sgd())
    trained = list(loop.model.parameters())
    loop.train(optimizer, 0, LATE)
    loop.wait()
    vector_to_parameters(parameters_to_vector(trained).detach() + SHIFT, trained)
    loop.train(optimizer, LATE)


class Sam(Optimizer):
    """As public ones are: two steps, of which the second puts back the weights of before."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.before = inner, list[torch.Tensor]()
        super().__init__(inner.param_groups, {})

    def trained(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        self.before = [parameter.data.clone() for parameter in self.trained()]
        for parameter in self.trained():
            parameter.add_(0.05 * parameter.grad)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter, data in zip(self.trained(), self.before, strict=True):
            parameter.data = data
        self.inner.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


def sam(loop: Loop) -> None:
    """The loop calls its two steps."""
    optimizer = loop.distribute(Sam(loop.sgd()))
    for step in range(STEPS):
        loop.backward(optimizer, step)
        optimizer.first_step()
        loop.loss(step).backward()
        optimizer.second_step()


def sam_with_closure(loop: Loop) -> None:
    optimizer = loop.distribute(Sam(loop.sgd()))
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.step(lambda step=step: loop.loss(step).backward())


def clamped_late(loop: Loop) -> None:
    """Through ``.data``, from a later step on."""
    optimizer = loop.distribute(loop.sgd())
    for step in range(STEPS):
        loop.train(optimizer, step, step + 1)
        if step >= LATE:
            for parameter in loop.model.parameters():
                parameter.data.clamp_(-0.1, 0.1)


def written_on_one(loop: Loop) -> None:
    """One rank clamps by its own data, say."""
    optimizer = loop.distribute(loop.sgd())
    loop.train(optimizer, 0, LATE)
    if loop.rank == 1 or loop.job is None:
        share = loop.system.share_of_write if loop.job is None else 1.0
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.add_(SHIFT * share)
    loop.train(optimizer, LATE)


def loaded_on_one(loop: Loop) -> None:
    """Rank 0 alone loads a state."""
    optimizer = loop.distribute(loop.sgd())
    loop.train(optimizer, 0, LATE)
    if loop.rank == 0:
        share = loop.system.share_of_write if loop.job is None else 1.0
        state = {k: v + SHIFT * share for k, v in loop.model.state_dict().items()}
        loop.model.load_state_dict(state)
    loop.train(optimizer, LATE)


# ---- averages of weights


class Averaged:
    """As libraries of averages are: they put the averages into the model, and its own back."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]
        self.kept: list[torch.Tensor] = []

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mean, parameter in zip(self.shadow, model.parameters(), strict=True):
            mean.lerp_(parameter, 0.5)

    def store(self, model: nn.Module) -> None:
        self.kept = [parameter.clone() for parameter in model.parameters()]

    def copy_to(self, model: nn.Module) -> None:
        for mean, parameter in zip(self.shadow, model.parameters(), strict=True):
            parameter.data.copy_(mean)

    def restore(self, model: nn.Module) -> None:
        for kept, parameter in zip(self.kept, model.parameters(), strict=True):
            parameter.data.copy_(kept)


def evaluated(loop: Loop) -> Numbers:
    with torch.no_grad():
        loop.model(torch.ones(1, INPUTS, dtype=loop.system.dtype))
    return weights(loop.model)


def swapped_by_hand(loop: Loop) -> None:
    """Averages are put into the model for an evaluation, and taken out again."""
    optimizer, means = loop.distribute(loop.sgd()), Averaged(loop.model)
    for step in range(STEPS):
        loop.train(optimizer, step, step + 1)
        means.update(loop.model)
        if step >= LATE:
            means.store(loop.model)
            means.copy_to(loop.model)
            loop.seen_in_step.append(evaluated(loop))
            means.restore(loop.model)


def swapped_with_gradients(loop: Loop) -> None:
    """The same, and the evaluation is not under ``torch.no_grad()``."""
    optimizer, means = loop.distribute(loop.sgd()), Averaged(loop.model)
    for step in range(STEPS):
        loop.train(optimizer, step, step + 1)
        means.update(loop.model)
        if step >= LATE:
            means.store(loop.model)
            means.copy_to(loop.model)
            loop.loss(step)
            means.restore(loop.model)


def swapped_in_block(loop: Loop) -> None:
    """The same within ``job.swapped_weights()``."""
    optimizer, means = loop.distribute(loop.sgd()), Averaged(loop.model)
    for step in range(STEPS):
        loop.train(optimizer, step, step + 1)
        means.update(loop.model)
        if step < LATE:
            continue
        if loop.job is None:
            loop.seen_in_step.append([x for mean in means.shadow for x in mean.flatten().tolist()])
            continue
        with loop.job.swapped_weights():
            means.copy_to(loop.model)
            loop.seen_in_step.append(evaluated(loop))


def averaged_by_hand(loop: Loop) -> None:
    """An average of weights, read right after ``step()``."""
    optimizer, means = loop.distribute(loop.sgd()), Averaged(loop.model)
    for step in range(STEPS):
        loop.train(optimizer, step, step + 1)
        means.update(loop.model)
        loop.model.zero_grad()
    loop.seen_in_step += [mean.flatten().tolist() for mean in means.shadow]


# ---- hooks, and a replaced step


def halve(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def hooks(loop: Loop) -> None:
    """A pre-hook changes gradients, late; post-hooks on either object read the step's weights."""
    optimizer, calls = loop.sgd(), [0, 0]

    def halve_later(optimizer: Optimizer, *_: Any) -> None:
        if calls[0] > LATE:  # where no hook ran, gradients would leave in backward by now
            halve(optimizer)

    def note(number: int) -> None:
        calls[number] += 1
        loop.seen_in_step.append(weights(loop.model))

    optimizer.register_step_pre_hook(halve_later)
    optimizer.register_step_post_hook(lambda *_: note(0))
    optimizer = loop.distribute(optimizer)
    optimizer.register_step_post_hook(lambda *_: note(1))
    loop.train(optimizer)
    loop.wait()  # workers that run ahead apply their last update late
    loop.seen += calls


def hooks_of_scaled(loop: Loop) -> None:
    """A pre-hook sees gradients without the scale of a ``GradScaler``."""
    optimizer = loop.sgd()

    def note(optimizer: Optimizer, *_: Any) -> None:
        given = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norm = float(sum(gradient.square().sum() for gradient in given))
        loop.seen.append(norm < 1000.0)

    optimizer.register_step_pre_hook(note)
    optimizer = loop.distribute(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loop.loss(step)).backward()
        scaler.step(optimizer)
        scaler.update()
    loop.wait()


def replaced_step(loop: Loop) -> None:
    """``optimizer.step`` is another function, which calls the one before."""
    optimizer = loop.sgd()
    before = optimizer.step

    def step(closure: Any = None) -> Any:
        halve(optimizer)
        return before(closure)

    optimizer.step = step
    loop.train(loop.distribute(optimizer))
    loop.check_steps()


def own_step(loop: Loop) -> None:
    """It makes the step itself."""
    optimizer = loop.sgd()

    def step(optimizer: Optimizer, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter -= 0.1 * parameter.grad

    optimizer.step = types.MethodType(step, optimizer)
    optimizer = loop.distribute(optimizer)
    torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    loop.train(optimizer)
    loop.check_steps()


def scheduled(loop: Loop) -> None:
    """A scheduler that was made before ``job.distribute`` wraps ``step``, as torch's do."""
    optimizer = loop.sgd()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer = loop.distribute(optimizer)
    for step in range(STEPS):
        loop.train(optimizer, step, step + 1)
        scheduler.step()


# ---- other optimizers


def second_phase(loop: Loop) -> None:
    """A new optimizer, which was not distributed."""
    optimizer = loop.distribute(loop.sgd())
    loop.train(optimizer, 0, LATE)
    loop.wait()
    loop.train(loop.sgd(), LATE)


def steps_in_backward(loop: Loop) -> None:
    """An optimizer of one parameter steps as soon as its gradient is there, to save memory."""
    bias = loop.model.head.bias
    own = torch.optim.SGD([bias], lr=0.1)

    def update(_: torch.Tensor) -> None:
        own.step()
        own.zero_grad()

    bias.register_post_accumulate_grad_hook(update)
    loop.train(loop.distribute(loop.sgd()))


def new_head(loop: Loop) -> None:
    """A part of the model is replaced, and trained by an optimizer of its own."""
    optimizer = loop.distribute(loop.sgd())
    loop.train(optimizer, 0, LATE)
    torch.manual_seed(2)
    loop.model.head = nn.Linear(WIDTH, OUTPUTS).to(loop.system.dtype)
    second = loop.sgd(loop.model.head)
    for step in range(LATE, STEPS):
        second.zero_grad()
        loop.train(optimizer, step, step + 1)
        second.step()


def criterion(loop: Loop) -> None:
    """A criterion with parameters of its own trains beside the model."""
    optimizer = loop.distribute(loop.sgd())
    scale = nn.Parameter(torch.ones((), dtype=loop.system.dtype))
    second = torch.optim.SGD([scale], lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        second.zero_grad()
        (loop.loss(step) * scale).backward()
        optimizer.step()
        second.step()


def autograd_grad(loop: Loop) -> None:
    """``p.grad = torch.autograd.grad(...)``, then ``step()``."""
    optimizer = loop.distribute(loop.sgd())
    for step in range(STEPS):
        trained = list(loop.model.parameters())
        found = torch.autograd.grad(loop.loss(step), trained)
        for parameter, gradient in zip(trained, found, strict=True):
            parameter.grad = gradient
        optimizer.step()


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


def wrapped(loop: Loop) -> None:
    """A wrapper is distributed, whose inner optimizer steps the same parameters."""
    loop.train(loop.distribute(Around(loop.sgd())))
    loop.check_steps()


def wrapping(loop: Loop) -> None:
    """The inner optimizer is distributed, and then wrapped."""
    loop.train(Around(loop.distribute(loop.sgd())))


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


def lookahead(loop: Loop) -> None:
    optimizer = loop.distribute(Lookahead(loop.sgd()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        loop.train(optimizer, step, step + 1)
        scheduler.step()
    loop.check_steps()


class Stateless(Lookahead):
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def stateless(loop: Loop) -> None:
    """A wrapper that has neither parameter groups nor state."""
    loop.distribute(Stateless(loop.sgd()))


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


def attributes(loop: Loop) -> None:
    optimizer = loop.distribute(Switched(loop.model.parameters(), lr=0.1))
    loop.train(optimizer)
    before = optimizer.rho
    optimizer.rho = 0.5
    loop.seen += [optimizer.train(), before, optimizer.report()]


def changing_method(loop: Loop) -> None:
    optimizer = loop.distribute(Switched(loop.model.parameters(), lr=0.1))
    loop.train(optimizer)
    optimizer.evaluate()


class ScheduleFree(Optimizer):
    """Weights are other ones in training and in evaluations; ``train`` and ``eval`` switch."""

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta})
        self.steps = 0

    def _each(self) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = parameter.detach().clone()
                yield group, parameter, state["z"]

    @torch.no_grad()
    def eval(self) -> None:
        for group, parameter, z in self._each():
            parameter.lerp_(z, 1 - 1 / group["beta"])

    @torch.no_grad()
    def train(self) -> None:
        for group, parameter, z in self._each():
            parameter.lerp_(z, 1 - group["beta"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group, parameter, z in self._each():
            x = parameter.lerp(z, 1 - 1 / group["beta"])
            z.sub_(parameter.grad, alpha=group["lr"])
            x.lerp_(z, 1 / self.steps)
            parameter.copy_(x.lerp(z, 1 - group["beta"]))


def schedule_free(loop: Loop) -> None:
    optimizer = loop.distribute(ScheduleFree(loop.model.parameters()))
    for step in range(STEPS):
        optimizer.train() if step else None
        loop.train(optimizer, step, step + 1)
        optimizer.eval()
        loop.seen_in_step.append(evaluated(loop))


# ---- the optimizer's state


def cleared(loop: Loop) -> None:
    """Momentum begins anew after some steps."""
    optimizer = loop.distribute(loop.sgd())
    loop.train(optimizer, 0, LATE)
    optimizer.state.clear()
    loop.train(optimizer, LATE)


def new_state(loop: Loop) -> None:
    optimizer = loop.distribute(loop.sgd())
    loop.train(optimizer, 0, LATE)
    optimizer.state = defaultdict(dict)
    loop.train(optimizer, LATE)


def state_by_hand(loop: Loop) -> None:
    optimizer = loop.distribute(loop.sgd())
    loop.train(optimizer, 0, LATE)
    for parameter in loop.model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    loop.train(optimizer, LATE)


# ---- memory formats, and what is not finite


def channels_last(loop: Loop) -> None:
    """Another layout in memory, after ``job.distribute``."""
    loop.model = loop.new(Pictures)
    optimizer = loop.distribute(loop.sgd())
    loop.model.to(memory_format=torch.channels_last)
    loop.train(optimizer)


def channels_last_late(loop: Loop) -> None:
    loop.model = loop.new(Pictures)
    optimizer = loop.distribute(loop.sgd())
    loop.train(optimizer, 0, LATE)
    loop.model.to(memory_format=torch.channels_last)
    loop.train(optimizer, LATE)


def read_nan(loop: Loop) -> None:
    """Weights that are NaN, and read after each step, have not changed since."""
    optimizer = loop.distribute(loop.sgd())
    for step in range(STEPS):
        optimizer.zero_grad()
        (loop.loss(step) * float("nan")).backward()
        optimizer.step()
        weights(loop.model)


def nan_loaded(loop: Loop) -> None:
    """A checkpoint with NaN."""
    with torch.no_grad():
        loop.model.wide.weight.fill_(float("nan"))
    loop.distribute(loop.sgd())
    if loop.job is not None:
        file = loop.folder / "nan"
        loop.job.save(file)
        while not file.exists():  # learners do not wait for the one that writes
            time.sleep(0.01)
        loop.job.load(file)


HABITS: dict[str, Callable[[Loop], None]] = {
    habit.__name__: habit
    for habit in (
        replaced_before, replaced_after, cloned, vector, vector_listed_late, vector_after_wait,
        sam, sam_with_closure, clamped_late, written_on_one, loaded_on_one,
        swapped_by_hand, swapped_with_gradients, swapped_in_block, averaged_by_hand,
        hooks, hooks_of_scaled, replaced_step, own_step, scheduled,
        second_phase, steps_in_backward, new_head, criterion, autograd_grad,
        wrapped, wrapping, lookahead, stateless,
        attributes, changing_method, schedule_free,
        cleared, new_state, state_by_hand,
        channels_last, channels_last_late, read_nan, nan_loaded,
    )
}  # fmt: skip


def told_by(loop: Loop) -> dict[str, Any]:
    in_step = loop.seen_in_step if loop.system.in_step else []
    return {"seen": loop.seen, "in_step": in_step, "weights": weights(loop.model)}


def alone(habit: str, system: System) -> dict[str, Any]:
    """What one process has in the end."""
    loop = Loop(None, system, Path())
    HABITS[habit](loop)
    return told_by(loop) | {"begun": loop.begun}


def main(habit: str, system: str, folder: str) -> None:
    rank = os.environ["RANK"]
    told: dict[str, Any] = {}
    try:
        with slipstream.init(wait_limit_s=60) as job:
            loop = Loop(job, system_of(system), Path(folder))
            HABITS[habit](loop)
        told = told_by(loop)
    except Exception as error:
        told = {"error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        (Path(folder) / f"told.{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    start_servers_by_fork()
    main(*sys.argv[1:])
