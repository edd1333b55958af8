"""Memory for messages, reused when they have left."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.transports.protocol import Ticket

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True, eq=False)
class Loan:
    """One buffer. It is free when it is no longer read, by this worker or by the transport."""

    data: Bytes
    tickets: list[Ticket] = field(default_factory=list)
    needed: bool = True  # until its user has released it

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
        """A free buffer of this size; its content is undefined."""
        loans = self._loans.setdefault(key, [])
        for loan in [loan for loan in loans if loan.free]:
            if loan.data.nbytes == nbytes:
                loan.tickets, loan.needed = [], True
                return loan
            loans.remove(loan)
        loans.append(Loan(np.empty(nbytes, np.uint8)))
        return loans[-1]
