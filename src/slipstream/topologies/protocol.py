"""The interface of topologies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from slipstream.parts import Part
from slipstream.types import Cluster, Node, Rank


class Topology(Part, frozen=True):
    """A frozen recipe that places chunks and names the receivers of a holder's results.

    A topology has a ``name``, ``facts``, ``deal``, and ``whole_layers``: True if all chunks of a
    layer have the same holders (``deal`` then places layers). By default servers hold tensors,
    no worker forwards, and results are not sent. Override what differs.
    """

    relays: ClassVar[bool] = False  # workers forward results to other workers

    @property
    def name(self) -> str:
        """The name in statistics."""
        raise NotImplementedError

    @property
    def needs_servers(self) -> bool:
        """True if servers hold tensors."""
        return True

    def deal(self, nbytes: Sequence[int], cluster: Cluster) -> tuple[tuple[Node, ...], ...]:
        """Place chunks.

        Args:
            nbytes: The size of every chunk.
            cluster: The workers and servers.

        Returns:
            The holders of each chunk, in the order of ``nbytes``.

        Raises:
            ConfigError: The topology is impossible in this cluster.
        """
        raise NotImplementedError

    def shares(self, cluster: Cluster) -> int:
        """Return among how many holders chunks are dealt: they are cut so that loads are equal."""
        return cluster.servers

    def fanout(self, node: Node, holder: Node, cluster: Cluster) -> tuple[Node, ...]:
        """Return who gets ``holder``'s results from ``node``; the holder is the first node."""
        return ()

    def without(self, rank: Rank) -> Self:
        """Return the same topology without a lost worker; its children have other parents."""
        return self
