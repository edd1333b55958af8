"""Models with every peculiarity, and how a step of their training goes.

A case is trained twice: by n workers, each with its own rank's samples, and by one process with
the samples of all ranks, in plain torch. ``ranks`` always says whose samples a process has; the
mean over workers of ``loss(model, step, (rank,), n)`` is ``loss(model, step, range(n), n)``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 30  # more than any cycle of what a case does at which step: 20
SAMPLES = 6
INPUTS, OUTPUTS = 12, 4
MOST_RANKS = 5
Ranks = Sequence[int]


@dataclass
class Loop:
    """What a training loop has at hand, in a worker or in the one process of the reference."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedulers: list[Any]
    ranks: Ranks
    world: int
    accumulate: Callable[[], AbstractContextManager[None]] = nullcontext
    notes: list[Any] = field(default_factory=list)

    def advance(self) -> None:
        self.optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()


def samples(step: int, ranks: Ranks, size: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of some ranks at a step, the same in every process."""
    drawn = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        drawn.append(torch.randn(size, INPUTS + OUTPUTS, generator=generator))
    both = torch.cat(drawn) if drawn else torch.empty(0, INPUTS + OUTPUTS)
    return both[:, :INPUTS], both[:, INPUTS:]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    """Moves the momentum as well."""
    lrs = [2 * group["lr"] for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, lrs, total_steps=STEPS + 1)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))


OPTIMIZERS = {"sgd": (sgd, one_cycle), "adam": (adam, cosine), "adamw": (adamw, warm_up)}


class Case:
    """A plain regression; the others differ from it in one thing each."""

    still: tuple[str, ...] = ()  # parameters that training must leave alone
    schedule_before_distribute = False

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(INPUTS, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, OUTPUTS)
        )

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return self.build()

    def distributed_model(self) -> nn.Module:
        """What the workers train, where it is not the very model of the reference."""
        return self.model()

    def after_distribute(self, model: nn.Module) -> nn.Module:
        return model

    def optimizer(self, model: nn.Module, kind: str) -> torch.optim.Optimizer:
        return OPTIMIZERS[kind][0](list(model.parameters()))

    def schedulers(self, optimizer: torch.optim.Optimizer, kind: str) -> list[Any]:
        return [OPTIMIZERS[kind][1](optimizer)]

    def loss(self, model: nn.Module, step: int, ranks: Ranks, world: int) -> torch.Tensor:
        inputs, targets = samples(step, ranks)
        return F.mse_loss(model(inputs), targets)

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad()
        self.loss(loop.model, step, loop.ranks, loop.world).backward()
        loop.advance()


class Groups(Case):
    """Two parameter groups with settings of their own."""

    def optimizer(self, model: nn.Module, kind: str) -> torch.optim.Optimizer:
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() <= 1]
        return OPTIMIZERS[kind][0](
            [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]
        )


class ScheduledBefore(Case):
    schedule_before_distribute = True


class Frozen(Case):
    """The optimizer holds frozen parameters too."""

    still = ("0.weight", "4.bias")

    def build(self) -> nn.Module:
        model = super().build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.still)
        return model


class Unoptimized(Case):
    """A parameter that has gradients but belongs to no optimizer."""

    still = ("2.weight",)

    def optimizer(self, model: nn.Module, kind: str) -> torch.optim.Optimizer:
        held = [p for name, p in model.named_parameters() if name not in self.still]
        return OPTIMIZERS[kind][0](held)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(INPUTS, OUTPUTS)
        self.own = nn.ModuleList(nn.Linear(INPUTS, OUTPUTS) for _ in range(MOST_RANKS))
        self.sometimes = nn.Linear(INPUTS, OUTPUTS)
        self.never = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, inputs: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        out: torch.Tensor = self.always(inputs)
        if step % 2:
            out = out + self.own[rank](inputs)
        if step % 3 == 0:
            out = out + self.sometimes(inputs)
        return out


class Unused(Case):
    """Parameters without a gradient: other ones on other ranks, and some used by nobody."""

    still = ("never.weight", "never.bias")

    def build(self) -> nn.Module:
        return Branches()

    def loss(self, model: nn.Module, step: int, ranks: Ranks, world: int) -> torch.Tensor:
        losses = []
        for rank in ranks:
            inputs, targets = samples(step, (rank,))
            losses.append(F.mse_loss(model(inputs, step, rank), targets))
        return torch.stack(losses).mean()

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad()
        self.loss(loop.model, step, loop.ranks, loop.world).backward()
        loop.notes.append(
            sorted(name for name, p in loop.model.named_parameters() if p.grad is None)
        )
        loop.advance()


class Kept(Unused):
    """``set_to_none=False``: what was used once has a gradient, of zero, ever after."""

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad(set_to_none=False)
        self.loss(loop.model, step, loop.ranks, loop.world).backward()
        loop.advance()


class Absent(Case):
    """At some steps one rank runs no backward at all."""

    def step(self, loop: Loop, step: int) -> None:
        step_without_one(self, loop, step)


def step_without_one(case: Case, loop: Loop, step: int) -> None:
    loop.optimizer.zero_grad()
    away = step % loop.world if step % 4 == 3 else None
    for rank in loop.ranks:
        if rank != away:
            share = len(loop.ranks)  # 1 in a worker: the mean over all workers divides
            (case.loss(loop.model, step, (rank,), loop.world) / share).backward()
    loop.advance()


class AbsentNorm(Absent):
    """No forward either, so its batch-norm statistics do not move that step."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 16), nn.BatchNorm1d(16), nn.Linear(16, OUTPUTS))

    def step(self, loop: Loop, step: int) -> None:
        away = step % loop.world if step % 4 == 3 else None
        if len(loop.ranks) == 1:
            super().step(loop, step)
            return
        loop.optimizer.zero_grad()
        present = [rank for rank in loop.ranks if rank != away]
        with averaged_buffers(loop.model, present) as forward_of:
            for rank in present:
                with forward_of(rank):
                    loss = self.loss(loop.model, step, (rank,), loop.world)
                (loss / len(loop.ranks)).backward()
        loop.advance()


class EmptyBatch(Case):
    """Ranks have different numbers of samples, at some steps none."""

    def loss(self, model: nn.Module, step: int, ranks: Ranks, world: int) -> torch.Tensor:
        sizes = [(step + rank) % 4 for rank in range(world)]
        total = max(1, sum(sizes))
        drawn = [samples(step, (rank,), sizes[rank]) for rank in ranks]
        inputs = torch.cat([one for one, _ in drawn])
        targets = torch.cat([one for _, one in drawn])
        loss = F.mse_loss(model(inputs), targets, reduction="sum")
        return loss / OUTPUTS * world / (len(ranks) * total)


class Tied(Case):
    """The embedding is the decoder's weight."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 16)
            self.middle = nn.Linear(16, 16)
            self.decoder = nn.Linear(16, 20)
            self.decoder.weight = self.embedding.weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.decoder(torch.tanh(self.middle(self.embedding(words))))
            return out

    def build(self) -> nn.Module:
        return self.Model()

    def loss(self, model: nn.Module, step: int, ranks: Ranks, world: int) -> torch.Tensor:
        words = (samples(step, ranks)[0].abs() * 10).long() % 20
        return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class Accumulated(Unused):
    """Three passes a step, two of them under ``accumulate``; each uses other parameters."""

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad()
        passes = [(self.loss(loop.model, 3 * step + i, loop.ranks, loop.world) / 3) for i in (0, 1)]
        for loss in passes:
            with loop.accumulate():
                loss.backward()
        (self.loss(loop.model, 3 * step + 2, loop.ranks, loop.world) / 3).backward()
        loop.advance()


class Busy(Accumulated):
    """Accumulates, and at some steps one rank runs no backward at all."""

    def step(self, loop: Loop, step: int) -> None:
        if step % 4 == 3:
            step_without_one(self, loop, step)
        else:
            super().step(loop, step)


class TwoBackwards(Unused):
    """Two backward passes before a step, without ``accumulate``; scheduled early, too."""

    schedule_before_distribute = True

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad()
        for part in (0, 1):
            (self.loss(loop.model, 2 * step + part, loop.ranks, loop.world) / 2).backward()
        loop.advance()


class Norm(Case):
    """Batch norm: statistics are the mean of the workers', which the reference works out."""

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(INPUTS, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, OUTPUTS)
        )

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad()
        with averaged_buffers(loop.model, loop.ranks) as forward_of:
            for rank in loop.ranks:
                with forward_of(rank):
                    loss = self.loss(loop.model, step, (rank,), loop.world)
                (loss / len(loop.ranks)).backward()
        loop.advance()


class averaged_buffers:  # noqa: N801  # used like contextlib's
    """Each rank's forward starts from the same buffers; afterwards they hold the ranks' mean."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._buffers = dict(model.named_buffers())
        self._before = {name: buffer.clone() for name, buffer in self._buffers.items()}
        self._after: list[dict[str, torch.Tensor]] = []
        self._ranks = ranks

    def __enter__(self) -> Callable[[int], AbstractContextManager[None]]:
        return lambda _rank: self._Forward(self)

    class _Forward:
        def __init__(self, outer: averaged_buffers) -> None:
            self._outer = outer

        def __enter__(self) -> None:
            for name, buffer in self._outer._buffers.items():
                buffer.data.copy_(self._outer._before[name])

        def __exit__(self, *_: object) -> None:
            buffers = self._outer._buffers.items()
            self._outer._after.append({name: buffer.clone() for name, buffer in buffers})

    def __exit__(self, *_: object) -> None:
        if len(self._ranks) < 2:
            return
        for name, buffer in self._buffers.items():
            if buffer.is_floating_point():
                buffer.data.copy_(torch.stack([after[name] for after in self._after]).mean(0))


class OwnBuffer(Case):
    """A buffer that at each step only some ranks change is averaged over those."""

    class Model(nn.Module):
        level: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(INPUTS, OUTPUTS)
            self.register_buffer("level", torch.zeros(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(inputs)
            return out

    def build(self) -> nn.Module:
        return self.Model()

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad()
        changing = [rank for rank in loop.ranks if (step + rank) % 2 == 0]
        if changing:
            values = [0.001 * step * (rank + 1) for rank in changing]
            dict(loop.model.named_buffers())["level"].fill_(sum(values) / len(values))
        self.loss(loop.model, step, loop.ranks, loop.world).backward()
        loop.advance()


class Dtypes(Case):
    """fp32, fp64 and bf16 side by side; bf16 is only as exact as bf16 is."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fp32 = nn.Linear(INPUTS, OUTPUTS)
            self.fp64 = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)
            self.bf16 = nn.Linear(INPUTS, OUTPUTS, dtype=torch.bfloat16)

        def forward(self, inputs: torch.Tensor) -> list[torch.Tensor]:
            parts = (self.fp32, self.fp64, self.bf16)
            return [part(inputs.to(part.weight.dtype)) for part in parts]

    def build(self) -> nn.Module:
        return self.Model()

    def loss(self, model: nn.Module, step: int, ranks: Ranks, world: int) -> torch.Tensor:
        inputs, targets = samples(step, ranks)
        losses = [F.mse_loss(out.double(), targets.double()) for out in model(inputs)]
        return torch.stack(losses).sum()


class Layouts(Case):
    """Transposed, strided with gaps, channels-last, zero-element, 0-dim and complex."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transposed = nn.Parameter(torch.randn(8, INPUTS).t() / 4)
            self.gaps = nn.Parameter((torch.randn(8, 2 * OUTPUTS) / 4)[:, ::2])
            self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
            self.nothing = nn.Parameter(torch.zeros(0, 8))
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.complex = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 4)
            self.imaginary = nn.Parameter(torch.randn(8) / 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(inputs @ self.transposed)
            hidden = torch.cat([hidden, self.nothing])
            # Conjugates make torch hand over gradients whose sign it has not changed yet.
            turned = torch.complex(hidden, hidden + self.imaginary).conj()
            hidden = (turned @ self.complex.conj()).real
            picture = inputs.view(-1, 3, 2, 2).to(memory_format=torch.channels_last)
            seen = self.conv(picture).flatten(1).mean(1, keepdim=True)
            return (hidden @ self.gaps + seen) * self.scale

    def build(self) -> nn.Module:
        return self.Model()


class Many(Case):
    """300 tiny tensors."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(torch.randn(1 + i % 3) for i in range(300))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            weights = torch.cat(list(self.parts)).view(50, INPUTS)
            return torch.tanh(inputs @ weights.t() / 8).mean(1, keepdim=True)

    def build(self) -> nn.Module:
        return self.Model()

    def loss(self, model: nn.Module, step: int, ranks: Ranks, world: int) -> torch.Tensor:
        inputs, targets = samples(step, ranks)
        return (10 * model(inputs) - targets).pow(2).mean()


class Sparse(Case):
    """An embedding whose gradients are sparse tensors."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(40, 8, sparse=True)
            self.layer = nn.Linear(8, OUTPUTS)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(self.embedding(words).mean(1))
            return out

    def build(self) -> nn.Module:
        return self.Model()

    def optimizer(self, model: nn.Module, kind: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def schedulers(self, optimizer: torch.optim.Optimizer, kind: str) -> list[Any]:
        return [cosine(optimizer)]

    def loss(self, model: nn.Module, step: int, ranks: Ranks, world: int) -> torch.Tensor:
        inputs, targets = samples(step, ranks)
        return F.mse_loss(model((inputs.abs() * 100).long() % 40), targets)


class CompiledBefore(Case):
    def distributed_model(self) -> nn.Module:
        model: nn.Module = torch.compile(self.model(), backend="aot_eager")
        return model


class CompiledAfter(Case):
    def after_distribute(self, model: nn.Module) -> nn.Module:
        compiled: nn.Module = torch.compile(model, backend="eager")
        return compiled


class Clipped(Case):
    """The gradients between ``backward`` and ``step`` are those of the union batch."""

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad()
        self.loss(loop.model, step, loop.ranks, loop.world).backward()
        gradients = [p.grad.flatten()[:5].tolist() for p in loop.model.parameters()]
        norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
        loop.notes.append([float(norm), *(value for row in gradients for value in row)])
        loop.advance()


class Checkpointed(Case):
    """Activations are computed again in the backward pass."""

    class Model(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant
            self.first = nn.Linear(INPUTS, 32)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)
            )
            self.last = nn.Linear(32, OUTPUTS)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.first(inputs)
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
            out: torch.Tensor = self.last(hidden)
            return out

    def __init__(self, reentrant: bool) -> None:
        self._reentrant = reentrant

    def build(self) -> nn.Module:
        return self.Model(self._reentrant)


class CheckpointedParts(Checkpointed):
    """Re-entrant, and only parts of the distributed model are ever called."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"one": self.Model(True), "two": self.Model(True)})

    def __init__(self) -> None:
        super().__init__(reentrant=True)

    def loss(self, model: nn.Module, step: int, ranks: Ranks, world: int) -> torch.Tensor:
        inputs, targets = samples(step, ranks)
        assert isinstance(model, nn.ModuleDict)
        return F.mse_loss(model["one"](inputs) + model["two"](inputs), targets)


class Attention(Case):
    """``MultiheadAttention`` reads its projection's weight without calling that module."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(OUTPUTS, 2, bias=False, batch_first=True)
            self.last = nn.Linear(OUTPUTS, OUTPUTS)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            words = inputs.view(len(inputs), -1, OUTPUTS)
            mixed, _ = self.attention(words, words, words, need_weights=False)
            out: torch.Tensor = self.last(mixed.mean(1))
            return out

    def build(self) -> nn.Module:
        return self.Model()


class QuasiNewton(Case):
    """LBFGS calls a closure, which runs several backward passes within one step."""

    def build(self) -> nn.Module:
        return nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)

    def optimizer(self, model: nn.Module, kind: str) -> torch.optim.Optimizer:
        # Each worker sees its own loss: nothing may be decided by it.
        return torch.optim.LBFGS(
            model.parameters(), lr=0.3, max_iter=4, tolerance_grad=0, tolerance_change=0
        )

    def schedulers(self, optimizer: torch.optim.Optimizer, kind: str) -> list[Any]:
        return [cosine(optimizer)]

    def step(self, loop: Loop, step: int) -> None:
        inputs, targets = samples(0, loop.ranks, size=20)

        def closure() -> float:
            loop.optimizer.zero_grad()
            loss = F.mse_loss(loop.model(inputs.double()), targets.double())
            loss.backward()
            return float(loss.detach())

        loop.optimizer.step(closure)
        for scheduler in loop.schedulers:
            scheduler.step()


class Together(Case):
    """Several cases as the parts of one model, to train all of them in one job."""

    def __init__(self, *parts: Case) -> None:
        self._parts = {type(part).__name__: part for part in parts}
        self.still = tuple(f"{name}.{s}" for name, part in self._parts.items() for s in part.still)

    def build(self) -> nn.Module:
        return nn.ModuleDict({name: part.model() for name, part in self._parts.items()})

    def loss(self, model: nn.Module, step: int, ranks: Ranks, world: int) -> torch.Tensor:
        assert isinstance(model, nn.ModuleDict)
        parts = self._parts.items()
        losses = [part.loss(model[name], step, ranks, world).double() for name, part in parts]
        return torch.stack(losses).sum()


CASES: dict[str, Case] = {
    "plain": Case(),
    "groups": Groups(),
    "scheduled_before": ScheduledBefore(),
    "frozen": Frozen(),
    "unoptimized": Unoptimized(),
    "unused": Unused(),
    "kept": Kept(),
    "absent": Absent(),
    "absent_norm": AbsentNorm(),
    "empty_batch": EmptyBatch(),
    "tied": Tied(),
    "accumulated": Accumulated(),
    "two_backwards": TwoBackwards(),
    "busy": Busy(),
    "norm": Norm(),
    "own_buffer": OwnBuffer(),
    "dtypes": Dtypes(),
    "layouts": Layouts(),
    "many": Many(),
    "sparse": Sparse(),
    "compiled_before": CompiledBefore(),
    "compiled_after": CompiledAfter(),
    "clipped": Clipped(),
    "checkpointed": Checkpointed(reentrant=False),
    "checkpointed_reentrant": Checkpointed(reentrant=True),
    "checkpointed_parts": CheckpointedParts(),
    "attention": Attention(),
    "quasi_newton": QuasiNewton(),
    "together": Together(
        Frozen(), Unused(), EmptyBatch(), Tied(), Dtypes(), Layouts(), Many(), Attention()
    ),
}


def train_alone(case: Case, kind: str, world: int, steps: int = STEPS) -> Loop:
    """One process, plain torch, the samples of all ranks."""
    model = case.model()
    optimizer = case.optimizer(model, kind)
    loop = Loop(model, optimizer, case.schedulers(optimizer, kind), range(world), world)
    for step in range(steps):
        case.step(loop, step)
    return loop


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under the names they have in the plain model.

    Without integers: batch norm counts each worker's own batches.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name.removeprefix("_orig_mod."): tensor.detach().clone()
        for name, tensor in named
        if tensor.is_floating_point() or tensor.is_complex()
    }


def digest(model: nn.Module) -> str:
    """Over every bit of every parameter and buffer."""
    total = hashlib.sha256()
    for name, tensor in sorted(state_of(model).items()):
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        total.update(name.encode())
        total.update(real.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    if not other.numel():
        return 0.0
    kind = torch.complex128 if other.is_complex() else torch.float64
    scale = float(other.to(kind).abs().max())
    difference = float((one.to(kind) - other.to(kind)).abs().max())
    return difference / scale if scale else difference and math.inf
