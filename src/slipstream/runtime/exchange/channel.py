"""The interface between a driver and its channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from slipstream.codecs.matrices import Matrix
from slipstream.runtime.exchange.send_buffers import Loan
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

    @property
    def wait_s(self) -> float:
        """Seconds for which the training thread has waited."""
        ...

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


class LayerChannel(Protocol):
    """How layers travel in compact form."""

    rank: int  # with the step, decides how few bits are rounded
    step: int  # of the training loop
    takes_early: bool  # whether a layer's first matrix may leave in the forward pass
    takes_encoded: bool  # whether matrices are given as they travel, or as they were captured

    def travel_compact(self, units: Collection[int]) -> None:
        """These layers travel in compact form, from this round on until told otherwise."""
        ...

    def buffer(self, unit: int, place: int, nbytes: int) -> Loan:
        """Memory for one of a layer's matrices, free to be written."""
        ...

    def early(self, unit: int, matrix: Matrix, loan: Loan) -> int:
        """Send a layer's first matrix in the forward pass; the round that it is for."""
        ...

    def early_round(self, unit: int) -> int | None:
        """The open round, if its first matrix has left."""
        ...

    def ready_layer(
        self, unit: int, matrices: Sequence[tuple[Matrix, Loan]] | None, *, early: bool = False
    ) -> None:
        """A layer's contribution to this round is final; None: the worker did not use it."""
        ...
