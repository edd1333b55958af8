"""What a topology answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.types import Cluster, Node, Rank


class Topology(Protocol):
    """A frozen recipe that places chunks and names the receivers of what a holder publishes."""

    @property
    def name(self) -> str: ...

    @property
    def needs_servers(self) -> bool: ...

    @property
    def relays(self) -> bool:
        """Whether workers pass results on to others."""
        ...

    @property
    def whole_layers(self) -> bool:
        """Whether all chunks of a layer have the same holders; ``deal`` is then given layers."""
        ...

    def deal(self, nbytes: Sequence[int], cluster: Cluster) -> tuple[tuple[Node, ...], ...]:
        """The holders of each chunk, given every chunk's size."""
        ...

    def fanout(self, node: Node, holder: Node, cluster: Cluster) -> tuple[Node, ...]:
        """To whom ``node`` passes what ``holder`` publishes; the holder itself comes first."""
        ...

    def without(self, rank: Rank) -> Topology:
        """The same when this worker is gone: whoever got things through it gets them otherwise."""
        ...
