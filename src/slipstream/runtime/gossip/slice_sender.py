"""The sender of one worker's partitions: each is sent when the one before has been sent.

So on a slow link updates accumulate, and no queue grows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np

from slipstream.codecs.partition import (
    Accumulator,
    PeerAccumulators,
    Rotation,
    packed,
    without,
)
from slipstream.codecs.residual import Floats, Residual
from slipstream.methods import PartialExchange
from slipstream.runtime.gossip.numbered_links import NumberedLinks
from slipstream.transports.protocol import Ticket
from slipstream.transports.wire import Part, checksum
from slipstream.types import Rank

MESSAGE_VALUES = 1 << 18


class SliceSender:
    """The updates accumulated for peers, and their sending; used by the training thread only.

    Args:
        rank: This worker's rank.
        rule: The rule of partial exchange.
        partitions: p, until ``start_rotation`` changes it.
        peers: The receivers of updates.
        numel: The number of weights.
        links: The links to the peers.
    """

    def __init__(
        self,
        rank: Rank,
        rule: PartialExchange,
        partitions: int,
        peers: Collection[Rank],
        numel: int,
        links: NumberedLinks,
    ) -> None:
        self.peers = set(peers)
        self._rank, self._rule, self._numel, self._links = rank, rule, numel, links
        self._unsent = self._accumulators(partitions)
        self._old_accumulators: list[Accumulator] = []  # of the old rotation
        self._in_flight: defaultdict[Rank, list[Ticket]] = defaultdict(list)

    @property
    def partitions(self) -> int:
        return self._unsent.rotation.partitions

    @property
    def accumulators(self) -> list[Accumulator]:
        """The accumulators, each of which needs as much memory as the model."""
        return self._old_accumulators + self._unsent.accumulators

    @property
    def is_turning_over(self) -> bool:
        """True if something of the old rotation has not been sent yet."""
        return bool(self._old_accumulators)

    def _accumulators(self, partitions: int) -> PeerAccumulators:
        rotation = Rotation(partitions, self._rule.same_for_all)
        return PeerAccumulators(rotation, self._rank, self.peers, self._numel)

    def add(self, update: Floats) -> None:
        self._unsent.add(update)

    def start_rotation(self, partitions: int) -> None:
        """Begin new accumulators for new updates; everything in the old ones will be sent."""
        self._old_accumulators += self._unsent.accumulators
        self._unsent = self._accumulators(partitions)

    def offer(self, step: int) -> bool:
        """Send due partitions whose predecessor has been sent.

        Returns:
            True if everything that is due could be sent.
        """
        for accumulator in [
            accumulator
            for accumulator in self._old_accumulators
            if self._is_free(accumulator.peers)
        ]:
            self._send(accumulator.peers, step, 0, accumulator.residual.values)
            self._old_accumulators.remove(accumulator)
        due = [each for each in self._unsent.accumulators if each.fresh]
        free = [each for each in due if self._is_free(each.peers)]
        for each in free:
            self._send(each.peers, step, *self._unsent.take(each, self._rule.held_back))
        return len(free) == len(due) and not self._old_accumulators

    def _is_free(self, peers: Collection[Rank]) -> bool:
        for peer in peers:
            self._in_flight[peer] = [t for t in self._in_flight[peer] if not t.done]
        return not any(self._in_flight[peer] for peer in peers)

    def _send(self, peers: Collection[Rank], step: int, start: int, values: Floats) -> None:
        # An empty partition (fewer weights than partitions) is sent, too: it carries the step.
        for offset in range(0, max(1, len(values)), MESSAGE_VALUES):
            numbers = values[offset : offset + MESSAGE_VALUES]
            is_packed = self._rule.held_back is not None and len(numbers) > 0
            piece = packed(numbers) if is_packed else numbers.view(np.uint8)
            crc = checksum([piece])
            last = offset + MESSAGE_VALUES >= len(values)
            for peer in peers:
                fields = (step, start + offset, last, crc, len(numbers) * is_packed)
                ticket = self._links.send(peer, Part, *fields, frames=[piece])
                if ticket is not None:
                    self._in_flight[peer].append(ticket)

    # ---- peers that die and come back

    def owed_to(self, peer: Rank) -> Floats:
        """Return a copy of everything that has not been sent to a peer yet."""
        owed = Residual.zeros(self._numel)
        for each in self.accumulators:
            if peer in each.peers:
                owed.add(each.residual.values)
        return owed.values

    def include(self, peer: Rank, values: Floats) -> None:
        """Include a peer that is back; these values are sent to it first."""
        self.peers.add(peer)
        self._old_accumulators.append(Accumulator(0, {peer}, Residual(values)))
        self._unsent.include(peer)

    def forget(self, peer: Rank) -> None:
        """Drop what has not been sent to a peer that has died."""
        self.peers.discard(peer)
        self._in_flight[peer].clear()
        self._unsent.forget(peer)
        self._old_accumulators = without(self._old_accumulators, peer)
