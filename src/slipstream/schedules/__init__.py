"""When a gradient leaves, and what goes first on a busy link. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol


class Schedule(Protocol):
    """A frozen rule about time and order."""

    @property
    def leaves_during_backward(self) -> bool: ...

    def priority(self, *, forward_order: int, backward_order: int) -> int:
        """Smaller goes first on a busy link."""
        ...


@dataclass(frozen=True, slots=True)
class AfterBackward:
    """Nothing leaves before the whole backward pass is done: the papers' vanilla baseline."""

    leaves_during_backward: ClassVar[bool] = False

    def priority(self, *, forward_order: int, backward_order: int) -> int:
        return backward_order


@dataclass(frozen=True, slots=True)
class WaitFree:
    """A layer's gradient leaves when its backward ends, first come first served."""

    leaves_during_backward: ClassVar[bool] = True

    def priority(self, *, forward_order: int, backward_order: int) -> int:
        return backward_order


@dataclass(frozen=True, slots=True)
class Priority:
    """Wait-free, and what the next forward pass needs first overtakes the rest."""

    leaves_during_backward: ClassVar[bool] = True

    def priority(self, *, forward_order: int, backward_order: int) -> int:
        return forward_order
