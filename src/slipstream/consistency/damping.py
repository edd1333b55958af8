"""The factor for the learning rate of an old gradient. Pure."""

from __future__ import annotations

from slipstream.errors import ConfigError
from slipstream.parts import Facts, Part, facts


class Constant(Part, frozen=True):
    """The same factor for every age.

    A learning rate that is stable in synchronous training may be too high for old gradients.

    Args:
        factor: The factor, above 0 and at most 1.

    Raises:
        ConfigError: The factor is out of range.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.factor, int | float) or not 0 < self.factor <= 1:
            raise ConfigError(
                f"a factor (rate_factor) of {self.factor!r}: give a number above 0, up to 1"
            )

    def facts(self) -> Facts:
        return facts("damped") if self.factor != 1 else facts()

    def rate(self, age: int) -> float:
        """Return the factor for a gradient computed from weights that are this many updates old."""
        return self.factor


class ByAge(Part, frozen=True):
    """A gradient that is k updates old counts 1/k.

    >>> ByAge().rate(0), ByAge().rate(4)
    (1.0, 0.25)
    """

    def facts(self) -> Facts:
        return facts("damped", "damped by age")

    def rate(self, age: int) -> float:
        return 1.0 / max(1, age)


# Every damping that a strategy may name.
AnyDamping = Constant | ByAge
