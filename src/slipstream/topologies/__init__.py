"""Topologies: who holds a chunk, and to whom its holder sends results. Pure."""

from slipstream.topologies.mesh import Mesh
from slipstream.topologies.peer_sharded import PeerSharded
from slipstream.topologies.protocol import Topology
from slipstream.topologies.sharded import Sharded
from slipstream.topologies.tree import Tree
from slipstream.topologies.two_level import TwoLevel

# Every topology that a strategy may name, also one that is read from JSON.
AnyTopology = Sharded | Mesh | PeerSharded | Tree | TwoLevel

__all__ = [
    "AnyTopology",
    "Mesh",
    "PeerSharded",
    "Sharded",
    "Topology",
    "Tree",
    "TwoLevel",
]
