"""The congestion of a member's links, measured from its own transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.planning.bandwidth import Passive
from slipstream.transports.protocol import Transport

HOLDS_S = 5.0  # how long an estimate is valid: with less traffic there is less to measure


@dataclass(slots=True)
class Watched:
    """A link: its measured rate, and the time until which it is assumed to be congested."""

    passive: Passive = field(default_factory=Passive)
    nbytes: int = 0
    seconds: float = 0.0
    until: float | None = None


class LinkWatch:
    """A watch over links: congested is one that carried less than ``enough`` bytes/s while busy.

    A link that carries little shows little, so a result is valid for ``HOLDS_S`` only. After that,
    one clock is sent as if the link were free, and measured again.

    Args:
        transport: The transport, which counts what has arrived.
        peers: The names of the peers.
        enough: The bytes/s below which a busy link is congested; None: no link is.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        transport: Transport,
        peers: Sequence[str],
        enough: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._transport, self._enough, self._clock = transport, enough, clock
        self._watched = {peer: Watched() for peer in peers}

    def congested(self) -> bool:
        """Return whether any of the links is congested."""
        if self._enough is None:
            return False
        now = self._clock()
        congested = [peer for peer, link in self._watched.items() if self._lacks(peer, link, now)]
        return bool(congested)

    def _lacks(self, peer: str, link: Watched, now: float) -> bool:
        assert self._enough is not None
        nbytes, seconds = self._transport.delivered(peer)
        before = link.passive.bytes_s
        if nbytes < link.nbytes:  # a new connection, which counts from 0
            link.nbytes, link.seconds = 0, 0.0
        link.passive.tell(nbytes - link.nbytes, max(0.0, seconds - link.seconds))
        if link.passive.bytes_s != before:  # otherwise it was too little, and accumulates
            link.nbytes, link.seconds = nbytes, seconds
        if link.until is not None and now > link.until:
            link.passive, link.nbytes, link.seconds, link.until = Passive(), nbytes, seconds, None
        elif link.passive.sufficient(self._enough) is not False:
            link.until = None
        elif link.until is None:
            link.until = now + HOLDS_S
        return link.until is not None
