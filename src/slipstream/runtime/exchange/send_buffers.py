"""Memory for what a worker sends, reused when it has left."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.transports.protocol import Ticket

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True, eq=False)
class Loan:
    """One buffer. It is free when nobody reads it any more, here or on its way."""

    data: Bytes
    tickets: list[Ticket] = field(default_factory=list)
    needed: bool = True  # until whoever took it has let go of it

    @property
    def free(self) -> bool:
        return not self.needed and all(ticket.done for ticket in self.tickets)

    def sent(self, tickets: Sequence[Ticket]) -> None:
        self.tickets += tickets

    def release(self) -> None:
        self.needed = False


class SendBuffers:
    """Buffers by key; a new one is made only while all others are in use."""

    def __init__(self) -> None:
        self._loans: dict[Hashable, list[Loan]] = {}

    def take(self, key: Hashable, nbytes: int) -> Loan:
        """A buffer of this size that is free; its content is left over."""
        loans = self._loans.setdefault(key, [])
        for loan in [loan for loan in loans if loan.free]:
            if loan.data.nbytes == nbytes:
                loan.tickets, loan.needed = [], True
                return loan
            loans.remove(loan)
        loans.append(Loan(np.empty(nbytes, np.uint8)))
        return loans[-1]
