"""Updates of the first K gradients of any age: the rule, and the decisions for all holders.

A worker has arrived when every holder has its part of the worker's gradient. The first K workers
that have arrived make the update, whatever weights their gradients are from; they get the new
weights, and the others continue computing. If every holder counted to K by itself, holders would
choose different workers, and K workers could wait for each other for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

import msgspec

from slipstream.consistency.admission import Admission
from slipstream.consistency.decisions import (
    Decision,
    HolderReports,
    Made,
    Reconsider,
    RoundRecord,
)
from slipstream.consistency.ledgers import DecidedLedger
from slipstream.consistency.protocol import RoundLedger
from slipstream.errors import ConfigError, FrameRefused
from slipstream.parts import Facts, facts
from slipstream.types import Rank


class KAsync(Admission, frozen=True):
    """Make one update of the mean of the first K gradients, of whatever age; none is dropped.

    With ``k=1`` every gradient is an update; with as many as there are workers, rounds contain all
    of them. While fewer than K workers remain, all of these make an update.

    Args:
        k: K, the number of gradients of an update.

    Raises:
        ConfigError: K is not a whole number of 1 or more.

    >>> state = KAsync(2).decider(workers=3, holders=1)
    >>> state.arrived(0, rank=2, round_=0, now=0.1), state.arrived(0, rank=0, round_=0, now=0.2)
    ([], [Made(round=0, ranks=(0, 2))])
    """

    k: int

    decided: ClassVar[bool] = True
    counts_late: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.k) is not int or self.k < 1:
            raise ConfigError(f"k={self.k!r}: give a number of gradients, 1 or more")

    def facts(self) -> Facts:
        return facts("every K gradients are an update")

    def among(self, workers: int) -> Self:
        k = 1 if workers == 1 else self.k  # the script runs as one process
        if k > workers:
            raise ConfigError(f"k={k} with {workers} workers: choose from 1 to {workers}")
        return msgspec.structs.replace(self, k=k)

    def ledger(self, workers: int, ahead: int) -> RoundLedger:
        return DecidedLedger()  # a gradient waits there until it is in an update

    def decider(
        self, workers: int, holders: int, reconsider: Reconsider | None = None
    ) -> KAsyncDecider:
        return KAsyncDecider(self.k, workers, holders)

    def instead_if_absent(self, workers: int) -> tuple[str, ...]:
        return () if self.k in (1, workers) else (f"k={workers}", "k=1")


@dataclass(slots=True)
class KAsyncDecider:
    """The decisions of updates of K gradients; implements ``Decider``.

    A worker has at most one gradient that is in no update yet.

    Args:
        k: K.
        workers: The number of workers.
        holders: The number of holders that report arrivals.
    """

    k: int
    workers: int
    holders: int
    round: int = 0
    members: set[Rank] = field(default_factory=set)
    left: set[Rank] = field(default_factory=set)  # workers that do not come back
    record: RoundRecord = field(default_factory=RoundRecord)
    close_after_s: float | None = None
    _reports: HolderReports = field(init=False)
    _arrived: set[Rank] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.members = set(range(self.workers))
        self.record.first.append((0, self.k))
        self._reports = HolderReports(self.holders)

    def arrived(self, holder: int, rank: Rank, round_: int, now: float) -> list[Decision]:
        if rank in self.left:
            return []
        if round_ > self.round or rank >= self.workers:
            raise FrameRefused(f"rank {rank} is in round {round_}, but {self.round} is open")
        self.members.add(rank)  # it may have been counted as lost
        if not self.record.arrivals.opened_at:
            self.record.arrivals.opened(0, now)  # the start of the first steps is unknown
        if self._reports.complete(holder, rank, round_):
            self.record.arrivals.arrived(rank, self.round, now)
            self._arrived.add(rank)
        return self.tick(now)

    def is_in(self, rank: Rank) -> bool:
        return rank in self._arrived

    def retire(self, rank: Rank, now: float, *, lost: bool = False) -> list[Decision]:
        self.members.discard(rank)
        if not lost:
            self.left.add(rank)
            self._reports.forget(rank)
        return self.tick(now)

    def tick(self, now: float) -> list[Decision]:
        """Make an update of the gradients that have arrived, if these are K or all."""
        if len(self._arrived) < max(1, min(self.k, len(self.members | self._arrived))):
            return []
        decision = Made(self.round, tuple(sorted(self._arrived)))
        self.record.made.update(self._arrived)
        for rank in self._arrived:
            self.record.arrivals.served(rank, now)
        self._arrived.clear()
        self.round += 1
        self.record.arrivals.opened(self.round, now)
        return [decision]
