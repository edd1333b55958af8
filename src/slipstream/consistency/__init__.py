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
from slipstream.consistency.gates import AnyGate, Lag, LagBehindPeers, NoWait
from slipstream.consistency.protocol import Closed, Progress, RoundLedger

__all__ = [
    "All",
    "AnyAdmission",
    "AnyDamping",
    "AnyGate",
    "Asynchronous",
    "ByAge",
    "Closed",
    "Consistency",
    "Constant",
    "FirstOf",
    "Lag",
    "LagBehindPeers",
    "NoWait",
    "Progress",
    "RoundLedger",
    "StaleSynchronous",
]
