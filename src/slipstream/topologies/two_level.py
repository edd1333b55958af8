"""Two levels: the workers of a host aggregate first, then one stream a host crosses the network."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.parts import Facts, facts
from slipstream.topologies.mesh import Mesh
from slipstream.topologies.peer_sharded import PeerSharded
from slipstream.topologies.protocol import Topology
from slipstream.topologies.sharded import Sharded
from slipstream.types import Cluster, Node

Between = Sharded | Mesh | PeerSharded


class TwoLevel(Topology, frozen=True):
    """A topology that sums a host's contributions in shared memory; hosts exchange the sums.

    The lowest rank of a host represents it on the network, where each host counts as one worker of
    the topology ``between``. If every worker has a host of its own, or all share one host,
    this is the topology ``between`` and nothing else.

    Args:
        between: The topology of the exchange between hosts.

    >>> TwoLevel(Sharded()).deal([100, 40], Cluster(workers=2, servers=2, members=((0, 1), (2, 3))))
    ((2,), (3,))
    """

    between: Between = Sharded()

    @property
    def name(self) -> str:
        return self.between.name

    @property
    def needs_servers(self) -> bool:
        return self.between.needs_servers

    @property
    def whole_layers(self) -> bool:
        return self.between.whole_layers

    def facts(self) -> Facts:
        return self.between.facts() | facts("hosts aggregate first")

    def shares(self, cluster: Cluster) -> int:
        return self.between.shares(cluster)

    def deal(self, nbytes: Sequence[int], cluster: Cluster) -> tuple[tuple[Node, ...], ...]:
        return self.between.deal(nbytes, cluster)

    def fanout(self, node: Node, holder: Node, cluster: Cluster) -> tuple[Node, ...]:
        return self.between.fanout(node, holder, cluster)
