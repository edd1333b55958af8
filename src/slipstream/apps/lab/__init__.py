"""Network namespaces with shaped links: many hosts on one machine, for tests and benchmarks."""

from slipstream.apps.lab.network import Host, Lab, Network, Traffic, find, why_unavailable
from slipstream.apps.lab.removal import existing, remove, remove_all
from slipstream.units import bits_per_second

__all__ = [
    "Host",
    "Lab",
    "Network",
    "Traffic",
    "bits_per_second",
    "existing",
    "find",
    "remove",
    "remove_all",
    "why_unavailable",
]
