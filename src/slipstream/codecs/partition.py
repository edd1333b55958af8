"""One partition of what accumulated for a peer, another one each time (Ako's partial exchange)."""

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
    """Which of p partitions worker j sends peer i the t-th time: (i − j + t) mod p.

    So in p times a peer gets all of them, and different peers get different ones. With
    ``same_for_all`` everybody gets (j + t) mod p: one accumulator will do for all peers.

    >>> rotation = Rotation(partitions=2)
    >>> [rotation.part(rotation.turn(sender=0, peer=1), time, numel=10) for time in range(2)]
    [slice(5, 10, None), slice(0, 5, None)]
    """

    partitions: int
    same_for_all: bool = False

    def turn(self, sender: Rank, peer: Rank) -> int:
        """Peers with the same turn get the same partitions at the same times."""
        return (sender if self.same_for_all else peer - sender) % self.partitions

    def part(self, turn: int, time: int, numel: int) -> slice:
        """What of ``numel`` values is due; no partition has two more than another."""
        due = (turn + time) % self.partitions
        return slice(due * numel // self.partitions, (due + 1) * numel // self.partitions)


@dataclass(slots=True, eq=False)
class Accumulator:
    """The residual of some peers, all of which have been sent the same."""

    turn: int
    peers: set[Rank]
    residual: Residual
    taken: int = 0  # how often
    fresh: bool = False  # whether anything was added since


class PeerAccumulators:
    """What one worker has still to send, to whom: an accumulator for peers with the same turn.

    Every update is added to every accumulator, and what is taken from one leaves it. So each value
    of each update leaves for each peer exactly once, however seldom it is taken.
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
        """Where the partition that is due begins, and what it holds.

        With ``above``, entries within the bound are zero there and stay in the accumulator.
        """
        part = self.rotation.part(accumulator.turn, accumulator.taken, self.numel)
        due = accumulator.residual.part(part)
        accumulator.taken += 1
        accumulator.fresh = False
        clock = EncodeContext(accumulator.taken)
        return part.start, due.take(EVERYTHING if above is None else bound(above, due, clock))

    def include(self, peer: Rank) -> None:
        """One more, to whom nothing is owed yet."""
        turn = self.rotation.turn(self._sender, peer)
        self.accumulators.append(Accumulator(turn, {peer}, Residual.zeros(self.numel)))

    def forget(self, peer: Rank) -> None:
        """A peer has died."""
        self.accumulators = without(self.accumulators, peer)


def without(accumulators: Collection[Accumulator], peer: Rank) -> list[Accumulator]:
    """Those that remain when a peer is gone; one that nobody else waits for goes with it."""
    for accumulator in accumulators:
        accumulator.peers.discard(peer)
    return [accumulator for accumulator in accumulators if accumulator.peers]


def bound(above: Above, due: Residual, ctx: EncodeContext) -> float:
    """δᵗ for what has accumulated."""
    flat = Values(due.values.view(np.uint8), "float32")
    return above.threshold(flat, np.zeros_like(due.values), ctx)


def packed(values: Floats) -> Buffer:
    """A slice on the wire where small entries were held back: as the filter packs it, without its
    zeros."""
    flat = Values(values.view(np.uint8), "float32")
    (frame,) = NOT_ZERO.encode(flat, Residual.zeros(values.size), HERE)
    return frame


def unpacked(frame: Buffer, numel: int) -> Floats:
    """What ``packed`` packed.

    Raises:
        FrameRefused: It is something else.
    """
    NOT_ZERO.examine([frame], numel, "float32")
    values = Values.empty(numel, "float32")
    NOT_ZERO.decode_into([frame], values)
    return values.data.view(np.float32)
