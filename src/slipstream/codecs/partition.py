"""A slice of what has accumulated for a peer, another one each time (Ako's partial exchange)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.types import Rank

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Which of p partitions worker j sends peer i the t-th time: (i − j + t) mod p.

    So in p times a peer gets all of them, and different peers get different ones. With
    ``same_for_all`` everybody gets (j + t) mod p: one accumulator will do for all peers.
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
class Debt:
    """What some peers have still to be sent, all of them the same."""

    turn: int
    peers: set[Rank]
    total: Floats
    taken: int = 0  # how often
    fresh: bool = False  # whether anything was added since


class Owed:
    """What one worker has still to send, to whom: an accumulator for peers with the same turn.

    Every update is added to every accumulator; what is taken from one is zero there from then on.
    So each value of each update leaves for each peer exactly once, however seldom it is taken.
    """

    def __init__(
        self, rotation: Rotation, sender: Rank, peers: Collection[Rank], numel: int
    ) -> None:
        self.rotation = rotation
        self.numel = numel
        self._sender = sender
        by_turn: dict[int, set[Rank]] = {}
        for peer in sorted(peers):
            by_turn.setdefault(rotation.turn(sender, peer), set()).add(peer)
        self.debts = [Debt(t, who, np.zeros(numel, np.float32)) for t, who in by_turn.items()]

    def add(self, update: Floats) -> None:
        for debt in self.debts:
            np.add(debt.total, update, out=debt.total)
            debt.fresh = True

    def take(self, debt: Debt) -> tuple[int, Floats]:
        """Where the partition that is due begins, and what it holds."""
        part = self.rotation.part(debt.turn, debt.taken, self.numel)
        taken = debt.total[part].copy()
        debt.total[part] = 0
        debt.taken += 1
        debt.fresh = False
        return part.start, taken

    def include(self, peer: Rank) -> None:
        """One more, to whom nothing is owed yet."""
        turn = self.rotation.turn(self._sender, peer)
        self.debts.append(Debt(turn, {peer}, np.zeros(self.numel, np.float32)))

    def forget(self, peer: Rank) -> None:
        """A peer has died; an accumulator that nobody else waits for goes with it."""
        for debt in self.debts:
            debt.peers.discard(peer)
        self.debts = [debt for debt in self.debts if debt.peers]
