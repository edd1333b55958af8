"""The interface of topologies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from slipstream.parts import Part
from slipstream.types import Cluster, Node, Rank


class Topology(Part, frozen=True):
    """A frozen recipe that places chunks and names the receivers of a holder's results.

    A topology has a ``name``, ``facts``, ``deal``, and ``whole_layers``: whether all chunks of a
    layer have the same holders (``deal`` then places layers). By default servers hold tensors,
    no worker forwards, and results are not sent. Override what differs.
    """

    relays: ClassVar[bool] = False  # whether workers forward results to other workers

    @property
    def name(self) -> str:
        """What statistics call it."""
        raise NotImplementedError

    @property
    def needs_servers(self) -> bool:
        """Whether servers hold tensors."""
        return True

    def deal(self, nbytes: Sequence[int], cluster: Cluster) -> tuple[tuple[Node, ...], ...]:
        """Place chunks.

        Args:
            nbytes: The size of every chunk.
            cluster: How many workers and servers there are.

        Returns:
            The holders of each chunk, in the order of ``nbytes``.

        Raises:
            ConfigError: The topology is impossible in this cluster.
        """
        raise NotImplementedError

    def shares(self, cluster: Cluster) -> int:
        """Among how many holders chunks are dealt: they are cut so that each gets an equal load."""
        return cluster.servers

    def fanout(self, node: Node, holder: Node, cluster: Cluster) -> tuple[Node, ...]:
        """To whom ``node`` sends the results of ``holder``; the holder itself is the first node."""
        return ()

    def without(self, rank: Rank) -> Self:
        """The same without this lost worker: its children get results another way."""
        return self
