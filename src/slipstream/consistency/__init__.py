"""When a worker may continue, and which contributions count. Pure."""

from slipstream.consistency.admission import All, AnyAdmission, Each, FirstOf, Fold
from slipstream.consistency.consistency import Consistency
from slipstream.consistency.damping import AnyDamping, ByAge, Constant
from slipstream.consistency.gates import AnyGate, Free, Lag, LagBehindPeers
from slipstream.consistency.protocol import Closed, Progress, RoundLedger

__all__ = [
    "All",
    "AnyAdmission",
    "AnyDamping",
    "AnyGate",
    "ByAge",
    "Closed",
    "Consistency",
    "Constant",
    "Each",
    "FirstOf",
    "Fold",
    "Free",
    "Lag",
    "LagBehindPeers",
    "Progress",
    "RoundLedger",
]
