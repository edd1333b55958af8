"""The interface between a driver and its channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol

from slipstream.types import Values


class Slots(Protocol):
    """The live tensors behind a plan's specs."""

    def source(self, tensor: int) -> Values | None:
        """This worker's contribution, or None."""
        ...

    def sink(self, tensor: int) -> Values:
        """Where to write the result."""
        ...

    def finish(self, tensor: int) -> None:
        """The whole result of this round is in the sink."""
        ...


class Channel(Protocol):
    """Sends one plan's tensors: in rounds over links, in collectives, or by partial exchange."""

    step: int  # of the training loop, so that holders detect workers in different steps
    wait_s: float

    @property
    def sent(self) -> Counter[str]:
        """Payload bytes by scheme, without traffic within this host."""
        ...

    @property
    def received(self) -> Counter[str]: ...

    def ready(self, tensor: int) -> None:
        """The tensor's contribution to this round is final."""
        ...

    def skip_round(self, tensors: Collection[int]) -> None:
        """These tensors take another route, from this round on until the next call."""
        ...

    def flush(self) -> None:
        """Send what is not ready yet as it is; this worker's part of the round is then complete."""
        ...

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        """Wait until the results of these tensors (default all) are in their sinks."""
        ...

    def refresh(self) -> None:
        """Between steps: apply results that arrived without being waited for."""
        ...


def rank_of(name: str, kind: str = "rank") -> int:
    """2 for ``rank 2``; -1 for anything else."""
    found, _, number = name.partition(" ")
    return int(number) if found == kind and number.isdecimal() and len(number) < 10 else -1
