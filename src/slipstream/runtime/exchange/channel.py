"""What drives an exchange, and what it drives: the seam between a driver and its channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol

from slipstream.types import Values


class Slots(Protocol):
    """The live tensors behind a plan's specs."""

    def source(self, tensor: int) -> Values | None:
        """What this worker contributes, or None."""
        ...

    def sink(self, tensor: int) -> Values:
        """Where the result goes."""
        ...

    def finish(self, tensor: int) -> None:
        """The whole result of this round is in the sink."""
        ...


class Channel(Protocol):
    """How one plan's tensors travel: in rounds over links, in collectives, or in slices."""

    step: int  # of the training loop, so that holders can tell when workers fall out of it

    @property
    def wait_s(self) -> float:
        """Seconds for which the training thread has waited."""
        ...

    @property
    def sent(self) -> Counter[str]:
        """Payload bytes by scheme, without what stays on this host."""
        ...

    @property
    def received(self) -> Counter[str]: ...

    def ready(self, tensor: int) -> None:
        """The tensor's contribution to this round is final."""
        ...

    def skip_round(self, tensors: Collection[int]) -> None:
        """These travel another way, from this round on until told otherwise."""
        ...

    def flush(self) -> None:
        """Everything not ready yet contributes what it has; the round is complete here."""
        ...

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        """Until the results of these tensors (default all) are in their sinks."""
        ...

    def refresh(self) -> None:
        """Between steps: take results that arrived without being waited for."""
        ...


def rank_of(name: str, kind: str = "rank") -> int:
    """2 for ``rank 2``; -1 for anything else."""
    found, _, number = name.partition(" ")
    return int(number) if found == kind and number.isdecimal() and len(number) < 10 else -1
