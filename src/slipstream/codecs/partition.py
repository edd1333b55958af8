"""Send one partition of what accumulated for a peer, in rotation (Ako's partial exchange).

References:
    Watcharapichat, Lopez Morales, Castro Fernandez and Pietzuch: Ako: Decentralised Deep Learning
    with Partial Gradient Exchange (2016).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from slipstream.codecs.filter import Filter
from slipstream.codecs.residual import EVERYTHING, Floats, Residual
from slipstream.codecs.select import Above
from slipstream.types import HERE, Buffer, EncodeContext, Rank, Values

NOT_ZERO = Filter(Above(0.0, decay="constant"))


@dataclass(frozen=True, slots=True)
class Rotation:
    """The partition that worker j sends peer i the t-th time: (i − j + t) mod p.

    After p times a peer has all partitions, and different peers get different ones at a time. With
    ``same_for_all`` all peers get (j + t) mod p, and need only one accumulator.

    >>> rotation = Rotation(partitions=2)
    >>> [rotation.part(rotation.turn(sender=0, peer=1), time, numel=10) for time in range(2)]
    [slice(5, 10, None), slice(0, 5, None)]
    """

    partitions: int
    same_for_all: bool = False

    def turn(self, sender: Rank, peer: Rank) -> int:
        """Return a number; peers with the same number get the same partitions at the same times."""
        return (sender if self.same_for_all else peer - sender) % self.partitions

    def part(self, turn: int, time: int, numel: int) -> slice:
        """Return the range of ``numel`` values that is due; sizes differ by at most one."""
        due = (turn + time) % self.partitions
        return slice(due * numel // self.partitions, (due + 1) * numel // self.partitions)


@dataclass(slots=True, eq=False)
class Accumulator:
    """The residual for a group of peers that have all been sent the same partitions."""

    turn: int
    peers: set[Rank]
    residual: Residual
    taken: int = 0  # the number of partitions taken
    fresh: bool = False  # something was added since the last one


class PeerAccumulators:
    """The values that one worker has not sent: an accumulator for all peers of a turn.

    Every update is added to every accumulator, and a partition that is sent is removed from it. So
    each value of each update is sent to each peer exactly once, however seldom partitions are sent.

    Args:
        rotation: Chooses the partition for each peer and time.
        sender: This worker's rank.
        peers: The ranks that receive partitions.
        numel: The number of values of the model.
    """

    def __init__(
        self, rotation: Rotation, sender: Rank, peers: Collection[Rank], numel: int
    ) -> None:
        self.rotation = rotation
        self.numel = numel
        self._sender = sender
        self.accumulators: list[Accumulator] = []
        by_turn: dict[int, set[Rank]] = {}
        for peer in sorted(peers):
            by_turn.setdefault(rotation.turn(sender, peer), set()).add(peer)
        for turn, those in by_turn.items():
            self.accumulators.append(Accumulator(turn, those, Residual.zeros(numel)))

    def add(self, update: Floats) -> None:
        for accumulator in self.accumulators:
            accumulator.residual.add(update)
            accumulator.fresh = True

    def take(self, accumulator: Accumulator, above: Above | None = None) -> tuple[int, Floats]:
        """Remove the partition that is due; return its start and its values.

        With ``above``, entries within the bound are returned as zeros and stay in the accumulator.
        """
        part = self.rotation.part(accumulator.turn, accumulator.taken, self.numel)
        due = accumulator.residual.part(part)
        accumulator.taken += 1
        accumulator.fresh = False
        clock = EncodeContext(accumulator.taken)
        return part.start, due.take(EVERYTHING if above is None else bound(above, due, clock))

    def include(self, peer: Rank) -> None:
        """Add a peer, for which nothing has accumulated yet."""
        turn = self.rotation.turn(self._sender, peer)
        self.accumulators.append(Accumulator(turn, {peer}, Residual.zeros(self.numel)))

    def forget(self, peer: Rank) -> None:
        """Drop what has accumulated for a dead peer alone."""
        self.accumulators = without(self.accumulators, peer)


def without(accumulators: Collection[Accumulator], peer: Rank) -> list[Accumulator]:
    """Return the accumulators without a dead peer; one that no other peer uses is dropped."""
    for accumulator in accumulators:
        accumulator.peers.discard(peer)
    return [accumulator for accumulator in accumulators if accumulator.peers]


def bound(above: Above, due: Residual, ctx: EncodeContext) -> float:
    """Return δᵗ for the accumulated values."""
    flat = Values(due.values.view(np.uint8), "float32")
    return above.threshold(flat, np.zeros_like(due.values), ctx)


def packed(values: Floats) -> Buffer:
    """Encode a partition with small entries held back: the filter's format, no zeros."""
    flat = Values(values.view(np.uint8), "float32")
    (frame,) = NOT_ZERO.encode(flat, Residual.zeros(values.size), HERE)
    return frame


def unpacked(frame: Buffer, numel: int) -> Floats:
    """Decode what ``packed`` encoded.

    Raises:
        FrameRefused: The frame has another format.
    """
    NOT_ZERO.examine([frame], numel, "float32")
    values = Values.empty(numel, "float32")
    NOT_ZERO.decode_into([frame], values)
    return values.data.view(np.float32)
