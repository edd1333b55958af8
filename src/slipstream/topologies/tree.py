"""Sharded servers that broadcast over trees: workers forward a holder's results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from slipstream.errors import ConfigError
from slipstream.parts import Facts, facts
from slipstream.topologies.protocol import Topology
from slipstream.topologies.sharded import Sharded
from slipstream.types import Cluster, Node, Rank

RankTree = tuple[tuple[Rank, ...], ...]


class Tree(Topology, frozen=True):
    """A topology with one broadcast tree per server; chunks are dealt to servers as by ``Sharded``.

    Args:
        children: One tree for each server: the receivers of the server itself, then the ranks to
            which worker 0, 1, … forward.
        gone: Lost workers, which trees need not reach.

    >>> chain = Tree(children=(((0,), (1,), ()),))  # the server to rank 0, rank 0 to rank 1
    >>> chain.fanout(node=0, holder=2, cluster=Cluster(workers=2, servers=1))
    (1,)
    >>> chain.without(0).children
    (((1,), (), ()),)
    """

    children: tuple[RankTree, ...]
    gone: tuple[Rank, ...] = ()

    name: ClassVar[str] = "tree"
    relays: ClassVar[bool] = True
    whole_layers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        # Trees that were read from a file are lists.
        try:
            plain = tuple(tuple(tuple(receivers) for receivers in tree) for tree in self.children)
        except TypeError as error:
            raise ConfigError(
                f"Tree({self.children!r}): for every server give a list of lists of ranks: whom "
                "the server sends to, then whom rank 0, 1, … pass results on to"
            ) from error
        msgspec.structs.force_setattr(self, "children", plain)
        msgspec.structs.force_setattr(self, "gone", tuple(self.gone))

    def facts(self) -> Facts:
        return facts("servers hold", "workers relay")

    def deal(self, nbytes: Sequence[int], cluster: Cluster) -> tuple[tuple[Node, ...], ...]:
        self.check(cluster)
        return Sharded().deal(nbytes, cluster)

    def fanout(self, node: Node, holder: Node, cluster: Cluster) -> tuple[Node, ...]:
        tree = self.children[holder - cluster.workers]
        if node == holder:
            return tree[0]
        return tree[node + 1] if node < cluster.workers else ()

    def check(self, cluster: Cluster) -> None:
        """Check the trees.

        Raises:
            ConfigError: A tree is for another cluster, misses a worker or reaches one twice.
        """
        if len(self.children) != cluster.servers:
            raise ConfigError(
                f"{len(self.children)} tree(s) for {cluster.servers} server(s); plan one for each"
            )
        for server, tree in zip(cluster.server_nodes, self.children, strict=True):
            if fault := _fault(tree, cluster, self.gone):
                raise ConfigError(f"the tree of {cluster.name(server)} {fault}; plan it again")

    def without(self, rank: Rank) -> Tree:
        """Return trees in which the parent of the lost worker sends to its children."""
        if rank in self.gone:
            return self
        return Tree(tuple(_bypass(tree, rank) for tree in self.children), (*self.gone, rank))


def _fault(tree: RankTree, cluster: Cluster, gone: Sequence[Rank]) -> str:
    """Return what is wrong with a tree; empty if nothing is."""
    if len(tree) != cluster.workers + 1:
        return f"is made for {len(tree) - 1} worker(s), not {cluster.workers}"
    times = Counter(rank for receivers in tree for rank in receivers)
    for rank in sorted({*times, *cluster.worker_nodes}, key=str):
        wanted = rank in cluster.worker_nodes and rank not in gone
        if times[rank] != wanted:
            return f"reaches rank {rank} {times[rank]} time(s) instead of {wanted:d}"
    # Each rank has one parent, so a rank that is not reached from the root is part of a cycle.
    reached = list(tree[0])
    for rank in reached:
        reached += tree[rank + 1]
    cut_off = sorted(set(cluster.worker_nodes) - {*reached, *gone})
    return f"does not reach rank {cut_off[0]}, which is cut off from the server" if cut_off else ""


def _bypass(tree: RankTree, rank: Rank) -> RankTree:
    if not 0 <= rank < len(tree) - 1:
        raise ConfigError(f"rank {rank} is in no tree; they have ranks 0 to {len(tree) - 2}")
    heirs = tree[rank + 1]
    passed_on = [
        tuple(heir for child in receivers for heir in (heirs if child == rank else (child,)))
        for receivers in tree
    ]
    passed_on[rank + 1] = ()
    return tuple(passed_on)
