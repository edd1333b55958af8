"""Schedules: when a gradient is sent, and what is sent first on a busy link. Pure."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from slipstream.parts import Facts, Part, facts


@runtime_checkable
class Schedule(Protocol):
    """A frozen rule about the time and order of sending."""

    @property
    def leaves_during_backward(self) -> bool: ...

    def facts(self) -> Facts: ...

    def priority(self, *, forward_order: int, backward_order: int) -> int:
        """Return a tensor's priority on a busy link.

        Args:
            forward_order: The tensor's position in the forward pass.
            backward_order: Its position in the backward pass.

        Returns:
            A number; the smallest is sent first.
        """
        ...


class AfterBackward(Part, frozen=True):
    """Send nothing before the whole backward pass is done: the papers' plain baseline.

    >>> AfterBackward().leaves_during_backward
    False
    """

    leaves_during_backward: ClassVar[bool] = False

    def priority(self, *, forward_order: int, backward_order: int) -> int:
        return backward_order


class WaitFree(Part, frozen=True):
    """Send a layer's gradient when its backward ends, in this order.

    >>> WaitFree().priority(forward_order=0, backward_order=9)
    9
    """

    leaves_during_backward: ClassVar[bool] = True

    def facts(self) -> Facts:
        return facts("leaves during backward")

    def priority(self, *, forward_order: int, backward_order: int) -> int:
        return backward_order


class Priority(WaitFree, frozen=True):
    """Send as ``WaitFree`` does, but layers that the next forward pass needs earlier first.

    >>> Priority().priority(forward_order=0, backward_order=9)
    0
    """

    def priority(self, *, forward_order: int, backward_order: int) -> int:
        return forward_order


# Every schedule that a strategy may name.
AnySchedule = AfterBackward | WaitFree | Priority
