"""When a worker may go on, and which contributions count. Pure."""

from slipstream.consistency.protocol import Book, Closed, Consistency, Progress
from slipstream.consistency.reach import WithinReach
from slipstream.consistency.rounds import Rounds
from slipstream.consistency.staleness import Asynchronous, BoundedStaleness

__all__ = [
    "Asynchronous",
    "Book",
    "BoundedStaleness",
    "Closed",
    "Consistency",
    "Progress",
    "Rounds",
    "WithinReach",
]
