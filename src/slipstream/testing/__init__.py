"""Tools for tests of slipstream and of code that uses it: virtual time, jobs in one thread."""

from slipstream.testing.clock import VirtualClock
from slipstream.testing.simulator import Simulation, simulate
from slipstream.testing.worker import Conduct

__all__ = ["Conduct", "Simulation", "VirtualClock", "simulate"]
