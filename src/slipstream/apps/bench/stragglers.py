"""Artificial stragglers: ``lognormal:0.5``, ``pareto:2.5``, ``worker:3:x5``, joined by commas.

Each recipe gives a factor for a worker's step time; several multiply. The delay is added to a step
that has been computed, so a step never becomes shorter:

    lognormal:σ    max(1, exp(σz)), z normal: only the upper tail; half of the steps are on time
    pareto:α       p with P(p > x) = x^(−α), x ≥ 1
    worker:K:xF    F, for rank K alone

The draws depend on (seed, rank, step) only: any worker can compute another's delay, and a run can
be repeated.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from slipstream.errors import ConfigError

LARGEST_SIGMA = 5.0
_NORMAL = NormalDist()
_FORMS = "lognormal:SIGMA, pareto:ALPHA or worker:RANK:xTIMES, joined by commas"


class Straggle(Protocol):
    """One recipe."""

    def slowdown(self, rank: int, uniform: float) -> float:
        """Return the factor for the step time; ``uniform`` is drawn from (0, 1)."""
        ...

    def check(self, world: int) -> None:
        """Check that a recipe is possible with so many workers."""
        ...


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A recipe for every worker, in every step; the median step is on time."""

    sigma: float

    def __post_init__(self) -> None:
        if not 0 < self.sigma <= LARGEST_SIGMA:
            raise ConfigError(
                f"lognormal:{self.sigma:g}: give a SIGMA above 0 and at most {LARGEST_SIGMA:g}, "
                "such as lognormal:0.5"
            )

    def slowdown(self, rank: int, uniform: float) -> float:
        return max(1.0, math.exp(self.sigma * _NORMAL.inv_cdf(uniform)))

    def check(self, world: int) -> None:
        """Do nothing: the recipe is valid for any number of workers."""


@dataclass(frozen=True, slots=True)
class Pareto:
    """A recipe for every worker, in every step; a few steps take very long."""

    alpha: float

    def __post_init__(self) -> None:
        if not (1 < self.alpha < math.inf):
            raise ConfigError(
                f"pareto:{self.alpha:g} has no mean to measure; give an ALPHA above 1, "
                "such as pareto:2.5"
            )

    def slowdown(self, rank: int, uniform: float) -> float:
        return float(uniform ** (-1 / self.alpha))

    def check(self, world: int) -> None:
        """Do nothing: the recipe is valid for any number of workers."""


@dataclass(frozen=True, slots=True)
class SlowWorker:
    """A recipe for one worker, in every step."""

    rank: int
    times: float

    def __post_init__(self) -> None:
        if not (1 <= self.times < math.inf):
            raise ConfigError(
                f"worker:{self.rank}:x{self.times:g}: a delay cannot make a step faster; "
                f"give 1 or more, such as worker:{self.rank}:x3"
            )

    def slowdown(self, rank: int, uniform: float) -> float:
        return self.times if rank == self.rank else 1.0

    def check(self, world: int) -> None:
        if self.rank >= world:
            raise ConfigError(
                f"worker:{self.rank}:x{self.times:g}: there are {world} workers; "
                f"name one of 0 to {world - 1}"
            )


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Recipes together; without recipes there is no delay."""

    recipes: tuple[Straggle, ...] = ()

    def check(self, world: int) -> None:
        for recipe in self.recipes:
            recipe.check(world)

    def delay_s(self, rank: int, step: int, *, seed: int, base_s: float) -> float:
        """Return the delay for a step that takes ``base_s`` by itself."""
        slowdown = math.prod(
            recipe.slowdown(rank, uniform(seed, rank, step, index))
            for index, recipe in enumerate(self.recipes)
        )
        return base_s * (slowdown - 1)


def uniform(*key: int) -> float:
    """Return a number in (0, 1) that depends on the key only, the same on every machine."""
    text = ":".join(str(int(part)) for part in key)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2**52


def parse_stragglers(text: str) -> Stragglers:
    """Parse the text of a command line; empty text means no stragglers."""
    return Stragglers(tuple(_recipe(part.strip()) for part in text.split(",") if part.strip()))


def _recipe(text: str) -> Straggle:
    kind, _, rest = text.partition(":")
    if kind not in _READERS:
        raise ConfigError(f"no stragglers {text!r}: write {_FORMS}")
    return _READERS[kind](text, rest)


def _read_lognormal(text: str, rest: str) -> Lognormal:
    return Lognormal(_number(text, rest))


def _read_pareto(text: str, rest: str) -> Pareto:
    return Pareto(_number(text, rest))


def _read_worker(text: str, rest: str) -> SlowWorker:
    match = re.fullmatch(r"(\d+):x(.+)", rest)
    if match is None:
        raise ConfigError(
            f"cannot read {text!r}: write worker:RANK:xTIMES, such as worker:2:x3, to make rank 2 "
            "take three times as long"
        )
    return SlowWorker(int(match[1]), _number(text, match[2]))


_READERS: dict[str, Callable[[str, str], Straggle]] = {
    "lognormal": _read_lognormal,
    "pareto": _read_pareto,
    "worker": _read_worker,
}


def _number(text: str, number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise ConfigError(f"cannot read {text!r}: {number!r} is not a number; {_FORMS}") from None
