"""For tests of slipstream and of what stands on it: virtual time, whole jobs in one thread."""

from slipstream.testing.clock import VirtualClock
from slipstream.testing.simulator import Simulation, simulate

__all__ = ["Simulation", "VirtualClock", "simulate"]
