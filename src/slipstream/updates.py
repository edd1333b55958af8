"""What is sent, who applies it, and what happens to gradients before and to weights after."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from slipstream.errors import ConfigError
from slipstream.outer_optimizers import AnyOuterOptimizer, OuterOptimizer
from slipstream.outer_optimizers import At as At
from slipstream.outer_optimizers import Nesterov as Nesterov
from slipstream.outer_optimizers.place import check_place, facts_of
from slipstream.parts import Facts, Part, facts, lists_to_tuples


class Gradients(Part, frozen=True):
    """No optimizer step before the exchange: gradients are sent.

    >>> Update(inner=Gradients()).inner.travels
    'gradients'
    """

    travels: ClassVar[Literal["gradients"]] = "gradients"

    def facts(self) -> Facts:
        return facts("gradients are sent")


class UserSteps(Part, frozen=True):
    """The user's optimizer steps first; the update delta, the change of the weights, is sent.

    A worker takes its own delta back, and gets it again as a part of the mean.

    >>> Update(inner=UserSteps(), outer=Add(at="worker")).inner.travels
    'steps'
    """

    travels: ClassVar[Literal["steps"]] = "steps"

    def facts(self) -> Facts:
        return facts("update deltas are sent")


class LocalSteps(Part, frozen=True):
    """Each worker trains on weights of its own; every H steps its outer gradient is sent (DiLoCo).

    θ are the outer weights, which all workers have in common, and θᵢ worker i's own. After H steps
    of the user's optimizer worker i sends Δᵢ = θ − θᵢ. The outer optimizer applies the mean of Δᵢ
    to θ, and the worker goes on from there:

        θᵢ ← α θᵢ + (1 − α) θ

    With F fragments each has rounds of its own, H / F steps apart, so that traffic is even. With
    τ overlap steps a worker trains on while its outer gradient is under way.

    Args:
        every: H.
        fragments: F, at most H: the model's tensors are dealt to so many parts of even size.
        overlap_steps: τ, less than H: the result is merged so many steps after the outer gradient
            was sent. 0 waits for it at once.
        mix: α, at least 0 and below 1: how much of its own weights a worker keeps when it merges.

    Raises:
        ConfigError: A value is out of range.

    >>> streamed = LocalSteps(every=4, fragments=2, overlap_steps=1)
    >>> [(step, streamed.sent_after(step), streamed.merged_after(step)) for step in range(1, 6)]
    [(1, None, None), (2, 0, None), (3, None, 0), (4, 1, None), (5, None, 1)]
    """

    every: int = 50
    fragments: int = 1
    overlap_steps: int = 0
    mix: float = 0.0

    travels: ClassVar[Literal["outer gradients"]] = "outer gradients"

    def __post_init__(self) -> None:
        for name in ("every", "fragments", "overlap_steps"):
            if type(value := getattr(self, name)) is not int:
                raise ConfigError(f"{name}={value!r}: give a whole number")
        if self.every < 1:
            raise ConfigError(f"every={self.every}: exchange after 1 step or more")
        if not 1 <= self.fragments <= self.every:
            raise ConfigError(
                f"fragments={self.fragments} with every={self.every}: choose from 1 to "
                f"{self.every}, since at most one fragment is sent after a step"
            )
        if not 0 <= self.overlap_steps < self.every:
            raise ConfigError(
                f"overlap_steps={self.overlap_steps} with every={self.every}: choose from 0 to "
                f"{self.every - 1}, so that a fragment is merged before it is sent again"
            )
        if not isinstance(self.mix, int | float) or not 0 <= self.mix < 1:
            raise ConfigError(f"mix={self.mix!r}: choose a share, at least 0 and below 1")

    def sent_after(self, step: int) -> int | None:
        """The fragment whose outer gradient is sent after so many steps; None: none is.

        Args:
            step: How many steps have been made, counted from 1.
        """
        within = (step - 1) % self.every + 1
        ends = [(f + 1) * self.every // self.fragments for f in range(self.fragments)]
        return ends.index(within) if step > 0 and within in ends else None

    def merged_after(self, step: int) -> int | None:
        """The fragment whose result is merged after so many steps; None: none is."""
        return self.sent_after(step - self.overlap_steps)

    def facts(self) -> Facts:
        parts = facts("in fragments") if self.fragments > 1 else facts()
        later = facts("merged later") if self.overlap_steps else facts()
        mixed = facts("keeps own weights in part") if self.mix else facts()
        return facts("outer gradients are sent") | parts | later | mixed


class UserOptimizer(Part, frozen=True):
    """The user's optimizer applies the result.

    Args:
        at: "worker": at every worker, so that results are mean gradients. "server": at the server
            that holds the tensor, so that results are new weights.

    Raises:
        ConfigError: ``at`` is neither.

    >>> Update(outer=UserOptimizer(at="server")).holder_applies
    True
    """

    at: At = "worker"

    def __post_init__(self) -> None:
        check_place(self.at)

    def facts(self) -> Facts:
        return facts_of(self.at) | facts("the optimizer applies the result")


class Add(Part, frozen=True):
    """Add the result, which is the mean of update deltas, to the weights.

    Args:
        at: Where it is added; at workers, since only they know their weights.

    Raises:
        ConfigError: ``at`` is no place.
    """

    at: At = "worker"

    def __post_init__(self) -> None:
        check_place(self.at)

    def facts(self) -> Facts:
        return facts_of(self.at) | facts("adds the result")


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
AnyInner = Gradients | UserSteps | LocalSteps
AnyOuter = UserOptimizer | Add | AnyOuterOptimizer
AnyTransform = ClipNorm


class Update(Part, frozen=True):
    """What is sent, who applies the result, and what happens before and after.

    Args:
        inner: Whether workers step before they exchange: ``Gradients``, ``UserSteps``,
            ``LocalSteps``.
        outer: Who applies the result, and how: ``UserOptimizer``, ``Add``, or an outer optimizer:
            ``SGD``, ``Nesterov`` or ``Adam``.
        before: What is done to a worker's gradient before it leaves: ``ClipNorm``.
        average: Averaged weights: ``Ema``, or None.

    >>> Update(outer=UserOptimizer(at="server"), average=Ema(0.9999)).holder_applies
    True
    """

    inner: AnyInner = Gradients()
    outer: AnyOuter = UserOptimizer()
    before: tuple[AnyTransform, ...] = ()
    average: Ema | None = None

    def __post_init__(self) -> None:
        lists_to_tuples(self)

    @property
    def holder_applies(self) -> bool:
        """Whether the holder updates weights and sends them back."""
        return self.outer.at == "server"

    @property
    def user_at_holder(self) -> bool:
        """Whether servers run the user's own optimizer."""
        return isinstance(self.outer, UserOptimizer) and self.outer.at == "server"

    @property
    def outer_optimizer(self) -> OuterOptimizer | None:
        """What applies outer gradients; None where the user's optimizer or nothing does."""
        return self.outer if isinstance(self.outer, OuterOptimizer) else None

    @property
    def clip_norm(self) -> float | None:
        """The norm to which a worker's own gradient is clipped; None if it is not."""
        return min((t.norm for t in self.before), default=None)

    def facts(self) -> Facts:
        found = self.inner.facts() | self.outer.facts()
        for part in (*self.before, *([self.average] if self.average else [])):
            found |= part.facts()
        return found
