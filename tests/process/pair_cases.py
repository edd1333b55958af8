"""Loops with several optimizers, for n workers and for one process that has all their samples.

Everything is in fp64, so that what is equal is equal to 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SAMPLES, NOISE, VALUES, HIDDEN = 5, 6, 8, 24
ROUNDS = 12
Optimizer = torch.optim.Optimizer
Pair = tuple[nn.Module, Optimizer]


def nothing() -> None:
    """In place of ``job.wait``, where weights are up to date anyway."""


@dataclass
class Loop:
    """What a loop has at hand, in a worker or in the one process of the reference."""

    pairs: Sequence[Pair]
    ranks: Sequence[int]
    backward_for: Callable[[Optimizer], AbstractContextManager[None]] = lambda _: nullcontext()
    wait: Callable[[], None] = nothing
    drawn: int = field(default=0)

    def samples(self, size: int) -> torch.Tensor:
        """Of these ranks, other ones each time."""
        self.drawn += 1
        parts = []
        for rank in self.ranks:
            generator = torch.Generator().manual_seed(1000 * self.drawn + rank)
            parts.append(torch.randn(SAMPLES, size, generator=generator, dtype=torch.float64))
        return torch.cat(parts)

    def step(self, optimizer: Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        with self.backward_for(optimizer):
            loss().backward()
        optimizer.step()
        self.wait()


def net(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Gan:
    """The critic steps twice for each step of the generator, whose pass runs through both."""

    def pairs(self, seed: int = 0) -> list[Pair]:
        torch.manual_seed(seed)
        generator, critic = net(NOISE, 3, VALUES), net(VALUES, HIDDEN, HIDDEN, 1)
        return [
            (generator, torch.optim.Adam(generator.parameters(), lr=0.01)),
            (critic, torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9)),
        ]

    def round(self, loop: Loop, number: int) -> None:
        (generator, of_generator), (critic, of_critic) = loop.pairs
        for _ in range(2):
            real, noise = loop.samples(VALUES) + 1, loop.samples(NOISE)
            made = generator(noise).detach()
            loop.step(
                of_critic,
                lambda real=real, made=made: (  # type: ignore[misc]
                    F.softplus(-critic(real)).mean() + F.softplus(critic(made)).mean()
                ),
            )
        noise = loop.samples(NOISE)
        loop.step(of_generator, lambda: F.softplus(-critic(generator(noise))).mean())


class Shared:
    """One model and two optimizers: the head steps every time, the body every third time."""

    def pairs(self, seed: int = 0) -> list[Pair]:
        torch.manual_seed(seed)
        body, head = net(VALUES, HIDDEN, HIDDEN), net(HIDDEN, 1)
        model = nn.ModuleDict({"body": body, "head": head})
        return [
            (model, torch.optim.SGD(body.parameters(), lr=0.1)),
            (model, torch.optim.Adam(head.parameters(), lr=0.01)),
        ]

    def round(self, loop: Loop, number: int) -> None:
        (model, of_body), (same, of_head) = loop.pairs
        assert model is same
        assert isinstance(model, nn.ModuleDict)
        values = loop.samples(VALUES)

        def loss() -> torch.Tensor:
            out: torch.Tensor = model["head"](torch.tanh(model["body"](values)))
            return F.mse_loss(out, values.sum(1, keepdim=True))

        loop.step(of_head, loss)
        if number % 3 == 0:
            loop.step(of_body, loss)


class Closures(Gan):
    """The generator's optimizer runs backward within its steps, several times."""

    def pairs(self, seed: int = 0) -> list[Pair]:
        (generator, _), critic = super().pairs(seed)
        parameters = generator.parameters()
        quasi_newton = torch.optim.LBFGS(
            parameters, lr=0.01, max_iter=2, tolerance_grad=0, tolerance_change=0
        )
        return [(generator, quasi_newton), critic]

    def round(self, loop: Loop, number: int) -> None:
        (generator, of_generator), (critic, of_critic) = loop.pairs
        real, made = loop.samples(VALUES) + 1, generator(loop.samples(NOISE)).detach()
        loop.step(
            of_critic,
            lambda: F.softplus(-critic(real)).mean() + F.softplus(critic(made)).mean(),
        )
        noise = loop.samples(NOISE)

        def closure() -> float:
            of_generator.zero_grad()
            loss = F.softplus(-critic(generator(noise))).mean()
            loss.backward()
            return float(loss.detach())

        of_generator.step(closure)


class GivenClosures(Gan):
    """Every step gets a closure, as frameworks do it; the backward pass came before."""

    def round(self, loop: Loop, number: int) -> None:
        (generator, of_generator), (critic, of_critic) = loop.pairs
        real, made = loop.samples(VALUES) + 1, generator(loop.samples(NOISE)).detach()
        of_critic.zero_grad()
        (F.softplus(-critic(real)).mean() + F.softplus(critic(made)).mean()).backward()
        of_critic.step(lambda: None)
        of_generator.zero_grad()
        F.softplus(-critic(generator(loop.samples(NOISE)))).mean().backward()
        of_generator.step(closure=lambda: None)


class Norms(Gan):
    """Both models have statistics, which change with every forward pass."""

    def pairs(self, seed: int = 0) -> list[Pair]:
        torch.manual_seed(seed)
        generator = nn.Sequential(net(NOISE, HIDDEN), nn.BatchNorm1d(HIDDEN), net(HIDDEN, VALUES))
        critic = nn.Sequential(net(VALUES, HIDDEN), nn.BatchNorm1d(HIDDEN), net(HIDDEN, 1))
        for model in (generator, critic):
            model.double()
        return [
            (generator, torch.optim.SGD(generator.parameters(), lr=0.01)),
            (critic, torch.optim.SGD(critic.parameters(), lr=0.05)),
        ]


CASES: dict[str, Any] = {
    "gan": Gan(),
    "shared": Shared(),
    "closures": Closures(),
    "given closures": GivenClosures(),
    "norms": Norms(),
}


def state_of(pairs: Sequence[Pair]) -> dict[str, torch.Tensor]:
    """Floating-point tensors by pair and name."""
    return {
        f"{number}/{name}": tensor.detach().clone()
        for number, (model, _) in enumerate(pairs)
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }


def train_alone(case: str, workers: int, rounds: int = ROUNDS) -> dict[str, torch.Tensor]:
    """One process, plain torch, the samples of all ranks."""
    pairs = CASES[case].pairs()
    loop = Loop(pairs, range(workers))
    for number in range(rounds):
        CASES[case].round(loop, number)
    return state_of(pairs)
