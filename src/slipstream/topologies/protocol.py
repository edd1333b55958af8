"""What a topology answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from slipstream.parts import Part
from slipstream.types import Cluster, Node, Rank


class Topology(Part, frozen=True):
    """A frozen recipe that places chunks and names the receivers of what a holder publishes.

    A topology has a ``name``, ``facts``, ``deal``, and ``whole_layers``: whether all chunks of a
    layer have the same holders (``deal`` is then given layers). By default servers hold tensors,
    nobody forwards, and results are sent to nobody. Override what differs.
    """

    relays: ClassVar[bool] = False  # whether workers forward results to others

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
            ConfigError: The cluster does not fit this topology.
        """
        raise NotImplementedError

    def fanout(self, node: Node, holder: Node, cluster: Cluster) -> tuple[Node, ...]:
        """To whom ``node`` sends what ``holder`` publishes; the holder itself is asked first."""
        return ()

    def without(self, rank: Rank) -> Self:
        """The same when this worker is lost: whoever got results through it gets them otherwise."""
        return self
