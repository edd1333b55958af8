"""A topology of one's own: some workers hold everything and send results to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from mixes import check, everywhere, run

from slipstream.codecs import Dense, Factors, Filter, OneBit
from slipstream.codecs.select import Above
from slipstream.consistency import All, Consistency, Lag
from slipstream.parts import Facts, facts
from slipstream.routes import Route
from slipstream.topologies import Topology
from slipstream.types import Cluster, Node


class OddRanks(Topology, frozen=True):
    """Odd ranks hold everything, each for the even rank before it, and the last one after it."""

    name: ClassVar[str] = "odd"
    needs_servers: ClassVar[bool] = False
    whole_layers: ClassVar[bool] = False

    def facts(self) -> Facts:
        return facts("every worker holds", "layers stay whole")

    def deal(self, nbytes: Sequence[int], cluster: Cluster) -> tuple[tuple[Node, ...], ...]:
        return (tuple(range(1, cluster.workers, 2)),) * len(nbytes)

    def fanout(self, node: Node, holder: Node, cluster: Cluster) -> tuple[Node, ...]:
        if node != holder:
            return ()
        is_last = node + 2 >= cluster.workers and node + 1 < cluster.workers
        return (node - 1, *([node + 1] if is_last else []))


@pytest.mark.parametrize("up", [Dense(), Dense("bfloat16"), OneBit(), Filter(Above()), Factors()])
@pytest.mark.parametrize("gate", [Lag(0), Lag(2)])
def test_every_contribution_counts_once_at_every_worker(up: Any, gate: Lag) -> None:
    topology: Any = OddRanks()
    strategy = everywhere("odd", Route(topology, up=up), consistency=Consistency(All(), gate))
    check(run(strategy))
