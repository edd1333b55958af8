"""What compact gradients must get right, all in one net; and ways to choose that no user would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cases import CASES, INPUTS, OUTPUTS, Case, Loop, Ranks, samples
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.plan import shape_of
from slipstream.planning.choosing import Chooser, Verdict, Ways
from slipstream.planning.costs import LayerShape
from slipstream.runtime.exchange import choices as layer_choices
from slipstream.runtime.exchange.choices import LayerChoices, layer_of
from slipstream.strategy import Strategy
from slipstream.systems import poseidon
from slipstream.types import Unit

WORDS, WIDTH, LENGTH = 60, 48, 3
FULL, LAST, EPOCH = 6, 2, 5  # samples in a batch, in the last of an epoch, batches of an epoch


@dataclass(frozen=True, slots=True)
class Everything:
    """Compact, whatever it costs."""

    def choose(
        self, shape: LayerShape, rows: int, ways: Ways, *, compact_bytes: float | None = None
    ) -> Verdict:
        return Verdict(True, 0.0, None, "a test wants it")


@dataclass(frozen=True, slots=True)
class ToAndFro:
    """Some layers while batches are full, and the others around the last one of an epoch."""

    def choose(
        self, shape: LayerShape, rows: int, ways: Ways, *, compact_bytes: float | None = None
    ) -> Verdict:
        full, wide = rows % (FULL * LENGTH) == 0, shape.outputs > WORDS
        return Verdict(full == wide, 0.0, None, "a test wants it")


USUAL = LayerChoices._verdict, layer_choices.PERIOD


def told(rule: Chooser, base: Strategy) -> Callable[[], Strategy]:
    """The strategy, with another rule in this process, asked every other step: a strategy itself
    names known rules only."""

    def verdict(choices: LayerChoices, unit: Unit, rows: int) -> Verdict:
        layer = layer_of(unit)
        return rule.choose(shape_of(layer), rows, choices._ways[layer.weight])

    def strategy() -> Strategy:
        LayerChoices._verdict = verdict  # type: ignore[method-assign]
        layer_choices.PERIOD = 2
        return base

    return strategy


def choose_as_usual() -> None:
    LayerChoices._verdict, layer_choices.PERIOD = USUAL  # type: ignore[method-assign]


SYSTEMS = {
    "everything": told(Everything(), poseidon(choose="bytes")),
    "everything-bfloat16": told(Everything(), poseidon(choose="bytes", wire="bfloat16")),
    "everything-int8": told(Everything(), poseidon(rate="200mbit", wire="int8")),
    "to-and-fro-int8": told(ToAndFro(), poseidon(rate="200mbit", wire="int8")),
    "everything-collective": told(Everything(), poseidon(rate="200mbit")),
    "to-and-fro": told(ToAndFro(), poseidon(choose="bytes")),
    "to-and-fro-collective": told(ToAndFro(), poseidon(rate="200mbit")),
}


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.tied = nn.Embedding(WORDS, WIDTH)
        self.three_d = nn.Linear(WIDTH, 2 * WIDTH)
        self.twice = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.no_bias = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.tied.weight
        # Dense, and the first to have its gradient: nothing is decided for the step before.
        self.norm = nn.LayerNorm(WORDS)

    def forward(self, words: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        hidden = self.words(words) + self.tied(words)
        hidden = torch.tanh(self.conv(hidden.transpose(1, 2)).transpose(1, 2))
        hidden = self.block(hidden)
        if (step + rank) % 3:
            hidden = hidden + self.sometimes(hidden)
        out: torch.Tensor = self.norm(self.decoder(hidden))
        return out

    def block(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.three_d(hidden))
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(hidden))))
        out: torch.Tensor = torch.tanh(self.no_bias(hidden))
        return out


class CheckpointedZoo(Zoo):
    def block(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().block, hidden, use_reentrant=False)
        return out


class Animals(Case):
    """Every fifth batch is a smaller one; a layer is skipped by a third of the ranks."""

    net: type[Zoo] = Zoo

    def build(self) -> nn.Module:
        return self.net()

    def optimizer(self, model: nn.Module, kind: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    def schedulers(self, optimizer: torch.optim.Optimizer, kind: str) -> list[Any]:
        return []

    def loss(self, model: nn.Module, step: int, ranks: Ranks, world: int) -> torch.Tensor:
        size = LAST if step % EPOCH == EPOCH - 1 else FULL
        losses = []
        for rank in ranks:
            words = (samples(step, (rank,), size)[0].abs() * 40).long() % WORDS
            words = words[:, : LENGTH + 1]
            out = model(words[:, :-1], step, rank)
            losses.append(F.cross_entropy(out.flatten(0, 1), words[:, 1:].flatten()))
        return torch.stack(losses).mean()


class CheckpointedAnimals(Animals):
    net = CheckpointedZoo


class AccumulatedAnimals(Animals):
    """Three passes a step, two of them under ``accumulate``."""

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad()
        for part in (0, 1):
            with loop.accumulate():
                (self.loss(loop.model, 3 * step + part, loop.ranks, loop.world) / 3).backward()
        (self.loss(loop.model, 3 * step + 2, loop.ranks, loop.world) / 3).backward()
        loop.advance()


class AssignedAnimals(Animals):
    """A loop that puts gradients into ``.grad`` itself: always, together with ``backward()``, or on
    some ranks only; in double precision."""

    def build(self) -> nn.Module:
        return super().build().double()

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad(set_to_none=bool(step % 3))
        loss = self.loss(loop.model, step, loop.ranks, loop.world)
        weights = [p for p in loop.model.parameters() if p.requires_grad]
        kind = (step + loop.ranks[0]) % 4
        if kind == 0:
            loss.backward()
        elif kind == 1:
            self.assign(weights, loss)
        elif kind == 2:  # a part of the loss, and the rest
            self.assign(weights, loss / 4, retain_graph=True)
            (3 * loss / 4).backward()
        else:  # some parameters, and the rest
            self.assign(weights[::2], loss, retain_graph=True)
            loss.backward(inputs=weights[1::2])
        loop.advance()

    def assign(
        self, weights: list[nn.Parameter], loss: torch.Tensor, *, retain_graph: bool = False
    ) -> None:
        found = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=retain_graph)
        for weight, gradient in zip(weights, found, strict=True):
            weight.grad = gradient


class AlwaysAssigned(AssignedAnimals):
    """What a loop for functional gradients does: in every step, on all ranks."""

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad()
        weights = [p for p in loop.model.parameters() if p.requires_grad]
        self.assign(weights, self.loss(loop.model, step, loop.ranks, loop.world))
        loop.advance()


class ReusedInput(Case):
    """The memory of the inputs is written to between passes of a step."""

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad()
        memory, targets = samples(step, loop.ranks)
        memory = memory.clone()
        for part in (0, 1, 2):
            memory.copy_(samples(3 * step + part, loop.ranks)[0])
            loss = F.mse_loss(loop.model(memory), targets) / 3
            if part < 2:
                with loop.accumulate():
                    loss.backward()
            else:
                loss.backward()
        loop.advance()


class TwoGraphs(Case):
    """Both forward passes come before both backward passes; a layer is used twice in each."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 32)
            self.twice = nn.Linear(32, 32)
            self.last = nn.Linear(32, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(inputs))
            out: torch.Tensor = self.last(torch.tanh(self.twice(torch.tanh(self.twice(hidden)))))
            return out

    def build(self) -> nn.Module:
        return self.Model()

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad()
        parts = [self.loss(loop.model, 2 * step + i, loop.ranks, loop.world) / 2 for i in (0, 1)]
        for part in parts:
            part.backward()
        loop.advance()


class Probing(TwoGraphs):
    """Asks for gradients on the side, throws passes away, keeps and changes gradients."""

    def step(self, loop: Loop, step: int) -> None:
        loop.optimizer.zero_grad()
        inputs, targets = samples(step, loop.ranks)
        inputs.requires_grad_()
        loss = F.mse_loss(loop.model(inputs), targets)
        weights = list(loop.model.parameters())
        (of_inputs,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        of_weights = torch.autograd.grad(loss, weights, retain_graph=True)
        assert of_inputs.abs().sum() > 0
        assert all(one.abs().sum() > 0 for one in of_weights)
        loop.model(inputs)  # and no backward
        loss.backward()
        kept = [parameter.grad for parameter in weights]
        was = [gradient.clone() for gradient in kept]
        loop.optimizer.zero_grad()
        F.mse_loss(loop.model(inputs), targets).backward()
        assert all(torch.equal(one, other) for one, other in zip(kept, was, strict=True))
        for parameter in weights:
            parameter.grad.data.add_(0.001)  # also where it was zero
        loop.advance()


class LaterFrozen(Case):
    """From some step on one layer's weight is frozen, another's bias, and all of a third."""

    def step(self, loop: Loop, step: int) -> None:
        if step == 20:
            for name in ("0.weight", "2.bias", "4.weight", "4.bias"):
                loop.model.get_parameter(name).requires_grad_(False)
        super().step(loop, step)

    def optimizer(self, model: nn.Module, kind: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02)

    def schedulers(self, optimizer: torch.optim.Optimizer, kind: str) -> list[Any]:
        return []


class NormLast(Case):
    """A dense bucket is complete before any layer has said whether it travels compact."""

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(INPUTS, 96), nn.Tanh(), nn.Linear(96, OUTPUTS), nn.LayerNorm(OUTPUTS)
        )

    def loss(self, model: nn.Module, step: int, ranks: Ranks, world: int) -> torch.Tensor:
        size = LENGTH * (LAST if step % EPOCH == EPOCH - 1 else FULL)
        inputs, targets = samples(step, ranks, size)
        return F.mse_loss(model(inputs), targets)


class Autocast(Case):
    """Compared with dense training in the same precision, not with one process."""

    def loss(self, model: nn.Module, step: int, ranks: Ranks, world: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss(model, step, ranks, world)


class Copied(Case):
    """Copies of the model train on their own; an average of its weights is kept."""

    def after_distribute(self, model: nn.Module) -> nn.Module:
        self.average = torch.optim.swa_utils.AveragedModel(model)
        return model

    def step(self, loop: Loop, step: int) -> None:
        super().step(loop, step)
        if len(loop.ranks) > 1:
            return
        self.average.update_parameters(loop.model)
        inputs, targets = samples(step, loop.ranks)
        F.mse_loss(self.average(inputs), targets).backward()  # by some ranks alone would do, too
        assert all(p.grad is not None for p in self.average.module.parameters())


POSEIDON_CASES: dict[str, Case] = {
    **CASES,
    "animals": Animals(),
    "animals_checkpointed": CheckpointedAnimals(),
    "animals_accumulated": AccumulatedAnimals(),
    "assigned": AssignedAnimals(),
    "always_assigned": AlwaysAssigned(),
    "reused_input": ReusedInput(),
    "two_graphs": TwoGraphs(),
    "probing": Probing(),
    "later_frozen": LaterFrozen(),
    "norm_last": NormLast(),
    "autocast": Autocast(),
    "copied": Copied(),
}
