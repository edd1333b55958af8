"""When a worker may continue, and which contributions count. Pure."""

from slipstream.consistency.admission import (
    All,
    AnyAdmission,
    Asynchronous,
    FirstOf,
    StaleSynchronous,
)
from slipstream.consistency.consistency import Consistency
from slipstream.consistency.damping import AnyDamping, ByAge, Constant
from slipstream.consistency.gates import Lag
from slipstream.consistency.protocol import Closed, Progress, RoundLedger

__all__ = [
    "All",
    "AnyAdmission",
    "AnyDamping",
    "Asynchronous",
    "ByAge",
    "Closed",
    "Consistency",
    "Constant",
    "FirstOf",
    "Lag",
    "Progress",
    "RoundLedger",
    "StaleSynchronous",
]
