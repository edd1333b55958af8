"""When a worker may go on, and which contributions count. Pure."""

from slipstream.consistency.protocol import Consistency, Progress
from slipstream.consistency.rounds import Rounds

__all__ = ["Consistency", "Progress", "Rounds"]
