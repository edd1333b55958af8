"""What is sent, who applies it, and what happens to gradients before and to weights after."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from slipstream.errors import ConfigError
from slipstream.parts import Facts, Part, facts, lists_to_tuples

At = Literal["worker", "holder"]
Growth = Literal["none", "sqrt", "linear"]
GROWTHS: dict[Growth, float] = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def _by(at: At) -> Facts:
    return facts("workers update") if at == "worker" else facts("the holder updates")


def _check_place(at: object) -> None:
    if at not in ("worker", "holder"):
        raise ConfigError(f"at={at!r}: choose 'worker' or 'holder'")


class Off(Part, frozen=True):
    """No optimizer step before the exchange: gradients are sent.

    >>> Update(inner=Off()).inner.travels
    'gradients'
    """

    travels: ClassVar[Literal["gradients"]] = "gradients"

    def facts(self) -> Facts:
        return facts("gradients are sent")


class UserSteps(Part, frozen=True):
    """The user's optimizer steps first; the update delta, the change of the weights, is sent.

    Args:
        own: "returned": the worker takes its own delta back, and gets it again as a part of the
            mean. "kept": the delta stays in the worker's weights, and only its peers add it.

    Raises:
        ConfigError: ``own`` is neither.

    >>> Update(inner=UserSteps(own="returned"), outer=Add(at="worker")).inner.travels
    'steps'
    """

    own: Literal["returned", "kept"] = "returned"

    travels: ClassVar[Literal["steps"]] = "steps"

    def __post_init__(self) -> None:
        if self.own not in ("returned", "kept"):
            raise ConfigError(f"own={self.own!r}: choose 'returned' or 'kept'")

    def facts(self) -> Facts:
        kept = facts("keeps its own update") if self.own == "kept" else facts()
        return facts("update deltas are sent") | kept


class User(Part, frozen=True):
    """The user's optimizer applies the result.

    Args:
        at: "worker": at every worker, so that results are mean gradients. "holder": at the server
            that holds the tensor, so that results are new weights.

    Raises:
        ConfigError: ``at`` is neither.

    >>> Update(outer=User(at="holder")).holder_applies
    True
    """

    at: At = "worker"

    def __post_init__(self) -> None:
        _check_place(self.at)

    def facts(self) -> Facts:
        return _by(self.at) | facts("the optimizer applies the result")


class Add(Part, frozen=True):
    """Add the result, which is made of update deltas, to the weights.

    Each worker's delta counts c = 1/n, so that n workers move as far as the mean of their deltas.

    Args:
        at: Where it is added; at workers, since only they know their weights.
        growth: "none"; "sqrt" or "linear" make c √n or n times as large.
        warm_steps: The number of steps in which c grows, linearly, from 1/n to that.

    Raises:
        ConfigError: A value is invalid.

    >>> [Add(growth="linear", warm_steps=10).coefficient(step, workers=4) for step in (0, 5, 10)]
    [0.25, 0.625, 1.0]
    """

    at: At = "worker"
    growth: Growth = "none"
    warm_steps: int = 0

    def __post_init__(self) -> None:
        _check_place(self.at)
        if self.growth not in GROWTHS:
            raise ConfigError(f"growth={self.growth!r}: choose one of {', '.join(GROWTHS)}")
        if type(self.warm_steps) is not int or self.warm_steps < 0:
            raise ConfigError(f"warm_steps={self.warm_steps!r}: give a number of steps, 0 or more")

    def facts(self) -> Facts:
        grows = self.growth != "none" or self.warm_steps
        more = facts("deltas grow with workers") if grows else facts()
        return _by(self.at) | facts("adds the result") | more

    def coefficient(self, step: int, workers: int) -> float:
        """The factor of one worker's delta.

        Args:
            step: How many steps the worker has made before.
            workers: n.

        >>> Add().coefficient(0, workers=4), Add(growth="linear").coefficient(0, workers=4)
        (0.25, 1.0)
        """
        full = workers ** GROWTHS[self.growth]
        warmth = min(1.0, step / self.warm_steps) if self.warm_steps else 1.0
        return float((1.0 + (full - 1.0) * warmth) / workers)


class ClipNorm(Part, frozen=True):
    """Scale a worker's whole gradient down to this norm before it is sent.

    Args:
        norm: Of all parameters' gradients together, above 0.

    Raises:
        ConfigError: The norm is not above 0.

    >>> Update(before=(ClipNorm(1.0),)).clip_norm
    1.0
    """

    norm: float

    def __post_init__(self) -> None:
        if not isinstance(self.norm, int | float):
            raise ConfigError(f"clipping to a norm of {self.norm!r}: give a number")
        if not 0 < self.norm < math.inf:
            raise ConfigError(f"clipping to a norm of {self.norm}: give one above 0")

    def facts(self) -> Facts:
        return facts("clips")


class Ema(Part, frozen=True):
    """Keep averaged weights as well: θ̄ ← decay·θ̄ + (1 − decay)·θ after every update.

    Args:
        decay: Between 0 and 1, such as 0.9999.

    Raises:
        ConfigError: The decay is out of range.

    >>> Update(average=Ema(0.9999)).average
    Ema(decay=0.9999)
    """

    decay: float

    def __post_init__(self) -> None:
        if not isinstance(self.decay, int | float):
            raise ConfigError(f"averaging with a decay of {self.decay!r}: give a number")
        if not 0 < self.decay < 1:
            raise ConfigError(
                f"averaging with a decay of {self.decay}: choose between 0 and 1, such as 0.9999"
            )

    def facts(self) -> Facts:
        return facts("averages")


# Everything that an update may name.
AnyInner = Off | UserSteps
AnyOuter = User | Add
AnyTransform = ClipNorm


class Update(Part, frozen=True):
    """What is sent, who applies the result, and what happens before and after.

    Args:
        inner: Whether workers step before they exchange: ``Off`` or ``UserSteps``.
        outer: Who applies the result, and how: ``User`` or ``Add``.
        before: What is done to a worker's gradient before it is sent: ``ClipNorm``.
        average: Averaged weights: ``Ema``, or None.

    >>> Update(outer=User(at="holder"), average=Ema(0.9999)).holder_applies
    True
    """

    inner: AnyInner = Off()
    outer: AnyOuter = User()
    before: tuple[AnyTransform, ...] = ()
    average: Ema | None = None

    def __post_init__(self) -> None:
        lists_to_tuples(self)

    @property
    def holder_applies(self) -> bool:
        """Whether the holder updates weights and sends them back."""
        return self.outer.at == "holder"

    @property
    def clip_norm(self) -> float | None:
        """The norm to which a worker's own gradient is clipped; None if it is not."""
        return min((t.norm for t in self.before), default=None)

    def facts(self) -> Facts:
        found = self.inner.facts() | self.outer.facts()
        for part in (*self.before, *([self.average] if self.average else [])):
            found |= part.facts()
        return found
