"""Who holds a chunk, and to whom its holder fans out. Pure."""

from slipstream.topologies.mesh import Mesh
from slipstream.topologies.protocol import Topology
from slipstream.topologies.sharded import Sharded
from slipstream.topologies.tree import Tree

__all__ = ["Mesh", "Sharded", "Topology", "Tree"]
