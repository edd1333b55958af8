"""Updates: what is sent, who applies it, and how gradients and weights are processed."""

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
    """Send gradients: no optimizer step comes before the exchange.

    >>> Update(inner=Gradients()).inner.travels
    'gradients'
    """

    travels: ClassVar[Literal["gradients"]] = "gradients"

    def facts(self) -> Facts:
        return facts("gradients are sent")


class UserSteps(Part, frozen=True):
    """Send update deltas: the user's optimizer steps first, and the change of the weights is sent.

    A worker undoes its own delta, and gets it again as a part of the mean.

    >>> Update(inner=UserSteps(), outer=Add(at="worker")).inner.travels
    'steps'
    """

    travels: ClassVar[Literal["steps"]] = "steps"

    def facts(self) -> Facts:
        return facts("update deltas are sent")


class LocalSteps(Part, frozen=True):
    """Train each worker on weights of its own; send its outer gradient every H steps (DiLoCo).

    θ are the outer weights, which all workers share, and θᵢ are worker i's own. After H steps
    of the user's optimizer worker i sends Δᵢ = θ − θᵢ. The outer optimizer applies the mean of Δᵢ
    to θ, and the worker continues from there:

        θᵢ ← α θᵢ + (1 − α) θ

    With F fragments each has rounds of its own, H / F steps apart, so that traffic is even. With
    τ overlap steps a worker continues training while its outer gradient is being exchanged.

    Args:
        every: H.
        fragments: F, at most H: the number of parts of even size into which the tensors are dealt.
        overlap_steps: τ, less than H: the result is merged so many steps after the outer gradient
            was sent. With 0 the worker waits for it.
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
        """Return the fragment whose outer gradient is sent after ``step`` steps; None if none is.

        Args:
            step: The number of steps that have been made, counted from 1.
        """
        within = (step - 1) % self.every + 1
        ends = [(f + 1) * self.every // self.fragments for f in range(self.fragments)]
        return ends.index(within) if step > 0 and within in ends else None

    def merged_after(self, step: int) -> int | None:
        """Return the fragment whose result is merged after ``step`` steps; None if none is."""
        return self.sent_after(step - self.overlap_steps)

    def facts(self) -> Facts:
        parts = facts("in fragments") if self.fragments > 1 else facts()
        later = facts("merged later") if self.overlap_steps else facts()
        mixed = facts("keeps own weights in part") if self.mix else facts()
        return facts("outer gradients are sent") | parts | later | mixed


class UserOptimizer(Part, frozen=True):
    """Apply the result with the user's optimizer.

    Args:
        at: "worker": at every worker, so that results are mean gradients. "server": at the server
            that holds the tensor, so that results are new weights.

    Raises:
        ConfigError: ``at`` is neither "worker" nor "server".

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
        at: The place where it is added: workers, since only they know their weights.

    Raises:
        ConfigError: ``at`` is neither "worker" nor "server".
    """

    at: At = "worker"

    def __post_init__(self) -> None:
        check_place(self.at)

    def facts(self) -> Facts:
        return facts_of(self.at) | facts("adds the result")


class ClipNorm(Part, frozen=True):
    """Scale a worker's whole gradient down to this norm before it is sent.

    Args:
        norm: The norm of all parameters' gradients together, above 0.

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
    """The exchange of updates: what is sent, who applies the result, and steps before and after.

    Args:
        inner: The steps of a worker before it sends: ``Gradients``, ``UserSteps``, ``LocalSteps``.
        outer: The one who applies the result, and how: ``UserOptimizer``, ``Add``, or an outer
            optimizer: ``SGD``, ``Nesterov`` or ``Adam``.
        before: Changes of a worker's gradient before it is sent: ``ClipNorm``.
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
        """True if the holder updates weights and sends them back."""
        return self.outer.at == "server"

    @property
    def user_at_holder(self) -> bool:
        """True if servers run the user's own optimizer."""
        return isinstance(self.outer, UserOptimizer) and self.outer.at == "server"

    @property
    def outer_optimizer(self) -> OuterOptimizer | None:
        """The optimizer of outer gradients, or None."""
        return self.outer if isinstance(self.outer, OuterOptimizer) else None

    @property
    def clip_norm(self) -> float | None:
        """The norm to which a worker's own gradient is clipped; None if it is not."""
        return min((t.norm for t in self.before), default=None)

    def facts(self) -> Facts:
        known = self.inner.facts() | self.outer.facts()
        for part in (*self.before, *([self.average] if self.average else [])):
            known |= part.facts()
        return known
