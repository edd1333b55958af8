"""Network namespaces with shaped links: many hosts on one machine, for tests and benchmarks."""

from slipstream.lab.network import Host, Lab, Traffic, why_unavailable
from slipstream.lab.removal import existing, remove, remove_all
from slipstream.lab.shaping import bits_per_second

__all__ = [
    "Host",
    "Lab",
    "Traffic",
    "bits_per_second",
    "existing",
    "remove",
    "remove_all",
    "why_unavailable",
]
