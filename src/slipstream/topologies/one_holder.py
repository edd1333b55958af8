"""One process of this machine holds all weights, in memory that every worker shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from slipstream.parts import Facts, facts
from slipstream.topologies.protocol import Topology
from slipstream.types import Cluster, Node


class OneHolder(Topology, frozen=True):
    """The first server holds every chunk; nothing is sent out, since workers read in place.

    >>> OneHolder().deal([100, 50], Cluster(workers=3, servers=1))
    ((3,), (3,))
    """

    name: ClassVar[str] = "one holder"
    whole_layers: ClassVar[bool] = False

    def facts(self) -> Facts:
        return facts("one process holds", "layers stay whole")

    def deal(self, nbytes: Sequence[int], cluster: Cluster) -> tuple[tuple[Node, ...], ...]:
        return ((cluster.workers,),) * len(nbytes)
