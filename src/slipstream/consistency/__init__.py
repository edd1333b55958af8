"""Consistency: when a worker may continue, and which contributions count. Pure."""

from slipstream.consistency.admission import All, Asynchronous, StaleSynchronous
from slipstream.consistency.consistency import AnyAdmission, Consistency
from slipstream.consistency.damping import AnyDamping, ByAge, Constant
from slipstream.consistency.decisions import Decider
from slipstream.consistency.first_of import FirstOf
from slipstream.consistency.gates import Lag
from slipstream.consistency.k_async import KAsync
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
    "Decider",
    "FirstOf",
    "KAsync",
    "Lag",
    "Progress",
    "RoundLedger",
    "StaleSynchronous",
]
