"""When a gradient leaves, and what goes first on a busy link. Pure."""

from __future__ import annotations

from typing import ClassVar, Protocol

from slipstream.parts import Facts, Part, facts


class Schedule(Protocol):
    """A frozen rule about time and order."""

    @property
    def leaves_during_backward(self) -> bool: ...

    def facts(self) -> Facts: ...

    def priority(self, *, forward_order: int, backward_order: int) -> int:
        """How urgent a tensor is on a busy link.

        Args:
            forward_order: The tensor's place in the forward pass.
            backward_order: Its place in the backward pass.

        Returns:
            A number; the smaller goes first.
        """
        ...


class AfterBackward(Part, frozen=True):
    """Nothing leaves before the whole backward pass is done: the papers' vanilla baseline.

    >>> AfterBackward().leaves_during_backward
    False
    """

    leaves_during_backward: ClassVar[bool] = False

    def priority(self, *, forward_order: int, backward_order: int) -> int:
        return backward_order


class WaitFree(Part, frozen=True):
    """A layer's gradient leaves when its backward ends, first come first served.

    >>> WaitFree().priority(forward_order=0, backward_order=9)
    9
    """

    leaves_during_backward: ClassVar[bool] = True

    def facts(self) -> Facts:
        return facts("leaves during backward")

    def priority(self, *, forward_order: int, backward_order: int) -> int:
        return backward_order


class Priority(WaitFree, frozen=True):
    """Wait-free, and what the next forward pass needs first overtakes the rest.

    >>> Priority().priority(forward_order=0, backward_order=9)
    0
    """

    def priority(self, *, forward_order: int, backward_order: int) -> int:
        return forward_order


class Merging(AfterBackward, frozen=True):
    """After backward, and when the link is free. What cannot leave yet is added to what comes next.

    >>> Merging().leaves_during_backward
    False
    """

    def facts(self) -> Facts:
        return facts("leaves when the link is free")


# Every schedule that a strategy may name.
AnySchedule = AfterBackward | WaitFree | Priority | Merging
