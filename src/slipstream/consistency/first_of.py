"""Rounds of the first N gradients: the rule, a holder's ledger, and the decisions for all holders.

A worker has arrived when every holder has its part of the worker's gradient. When enough workers
have arrived, they make the round, and every holder gets this decision. A worker that arrives for a
closed round gets the current weights at once. If it is late twice in a row, it gets them when the
next round opens, and starts that round with the other workers; if all steps took equally long, it
would otherwise always be late. Holders get decisions in the same order, so that a worker gets the
same version of the weights from all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

import msgspec

from slipstream.consistency.admission import Admission
from slipstream.consistency.decisions import (
    Decision,
    HolderReports,
    Late,
    Made,
    Reconsider,
    RoundRecord,
)
from slipstream.consistency.ledgers import DecidedLedger
from slipstream.consistency.protocol import Closed, RoundLedger
from slipstream.errors import ConfigError, FrameRefused
from slipstream.parts import Facts, facts
from slipstream.types import Rank


class FirstOf(Admission, frozen=True):
    """Close a round with the first N complete gradients, the same ones at every holder.

    The other gradients are dropped; their workers join the round that is open then.

    Args:
        first: N.
        backup: How many workers a round does not wait for; N is the number of the others.
        adapts: Choose N again after every round, from measured times.
        close_after_s: A round also closes after this time with the gradients that have arrived.
        min_first: The fewest gradients with which a round closes after ``close_after_s``.

    Raises:
        ConfigError: A number is out of range, or both ``first`` and ``backup`` are given.

    >>> FirstOf(backup=1).among(workers=8).first
    7
    """

    first: int | None = None
    backup: int | None = None
    adapts: bool = False
    close_after_s: float | None = None
    min_first: int = 1

    decided: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("first", "backup", "min_first"):
            if type(value := getattr(self, name)) not in (int, type(None)):
                raise ConfigError(f"{name}={value!r}: give a whole number")
        if self.close_after_s is not None and not isinstance(self.close_after_s, int | float):
            raise ConfigError(f"close_after_s={self.close_after_s!r}: give seconds above 0")
        if self.first is not None and self.backup is not None:
            raise ConfigError("give first or backup, not both")
        if self.first is not None and self.first < 1:
            raise ConfigError(f"first={self.first}: at least one worker must make a round")
        if self.backup is not None and self.backup < 0:
            raise ConfigError(f"backup={self.backup}: give 0 or more")
        if self.close_after_s is not None and not self.close_after_s > 0:
            raise ConfigError(f"close_after_s={self.close_after_s}: give seconds above 0")
        if self.min_first < 1 or (self.first is not None and self.min_first > self.first):
            raise ConfigError(f"min_first={self.min_first}: choose from 1 to first={self.first}")

    def facts(self) -> Facts:
        return facts("rounds of the first N")

    def among(self, workers: int) -> Self:
        """Return the same rule with N filled in."""
        first = workers - (self.backup or 0) if self.first is None else self.first
        if workers == 1:
            first = 1  # the script runs as one process
        if not 1 <= first <= workers:
            argument = f"backup={self.backup}" if self.first is None else f"first={self.first}"
            allowed = f"1 to {workers}" if self.first is not None else f"0 to {workers - 1}"
            raise ConfigError(f"{argument} with {workers} workers: choose from {allowed}")
        changed = {"first": first, "backup": None, "min_first": min(self.min_first, first)}
        return msgspec.structs.replace(self, **changed)

    def ledger(self, workers: int, ahead: int) -> RoundLedger:
        return FirstOfLedger()

    def decider(
        self, workers: int, holders: int, reconsider: Reconsider | None = None
    ) -> Agreement:
        return Agreement(self, workers, holders, reconsider if self.adapts else None)

    def instead_if_absent(self, workers: int) -> tuple[str, ...]:
        of_all = self.first == workers and not self.adapts and self.close_after_s is None
        closes_anyway = self.close_after_s is not None and self.min_first == 1
        if of_all or closes_anyway:
            return ()
        return (f"first={workers}", "close_after_s with min_first=1")

    def closes(self, *, num_arrived: int, members: int, open_s: float) -> bool:
        """Return whether a round is complete that has ``num_arrived`` of ``members`` contributions
        after ``open_s`` seconds."""
        if num_arrived >= min(self.first or members, members):
            return True
        return (
            self.close_after_s is not None
            and open_s >= self.close_after_s
            and num_arrived >= self.min_first
        )


class FirstOfLedger(DecidedLedger):
    """Rounds of the first N at one holder, which drops contributions that are too late."""

    __slots__ = ()

    def arrive(self, rank: Rank, clock: int) -> bool:
        return clock >= self.round and super().arrive(rank, clock)

    def close(self) -> Closed | None:
        closed = super().close()
        if closed is not None:
            self._arrived.clear()
        return closed


@dataclass(slots=True)
class Agreement:
    """The decisions of rounds of the first N; implements ``Decider``.

    Args:
        rule: The rule, with N filled in.
        workers: The number of workers.
        holders: The number of holders that report arrivals.
        reconsider: Called after every round; returns N of the next one. None keeps N.
    """

    rule: FirstOf
    workers: int
    holders: int
    reconsider: Reconsider | None = None
    round: int = 0
    members: set[Rank] = field(default_factory=set)
    left: set[Rank] = field(default_factory=set)  # workers that do not come back
    record: RoundRecord = field(default_factory=RoundRecord)
    close_after_s: float | None = field(init=False)
    _reports: HolderReports = field(init=False)
    _arrived: set[Rank] = field(default_factory=set)
    _held: dict[Rank, float] = field(default_factory=dict)  # by waiting worker: since when
    _round_s: float = 0.0  # the last round's duration
    _dropped_last: dict[Rank, bool] = field(default_factory=dict)
    _opened_at: float | None = None

    def __post_init__(self) -> None:
        self.members = set(range(self.workers))
        self.record.first.append((0, self.rule.first))
        self.close_after_s = self.rule.close_after_s
        self._reports = HolderReports(self.holders)

    def arrived(self, holder: int, rank: Rank, round_: int, now: float) -> list[Decision]:
        """Record that a holder has its whole part of a worker's gradient for a round.

        Returns:
            The new decisions. A repeated report of a holder changes nothing.

        Raises:
            FrameRefused: The round is not open yet.
        """
        if rank in self.left:
            return []  # the report came after the worker left
        if round_ > self.round or rank >= self.workers:
            raise FrameRefused(f"rank {rank} is in round {round_}, but {self.round} is open")
        self.members.add(rank)  # it may have been counted as lost
        if self._opened_at is None:
            self._open(now)  # the start of the first steps is unknown
        if not self._reports.complete(holder, rank, round_):
            return []
        self.record.arrivals.arrived(rank, round_, now)
        if round_ == self.round:
            self._arrived.add(rank)
            return self.tick(now)
        late_twice = self._dropped_last.get(rank) is True
        self.record.dropped[rank] += 1
        self.record.late.append((round_, rank))
        self._dropped_last[rank] = True
        if late_twice and self._enough_without({*self._held, rank}):
            self._held[rank] = now
            return []
        self.record.arrivals.served(rank, now)
        return [Late(self.round, rank)]

    def is_in(self, rank: Rank) -> bool:
        """Return whether this worker's gradient for the open round has arrived."""
        return rank in self._arrived

    def retire(self, rank: Rank, now: float, *, lost: bool = False) -> list[Decision]:
        """Remove a worker that has left or counts as lost; rounds close without it."""
        self.members.discard(rank)
        if not lost:
            self.left.add(rank)
            self._reports.forget(rank)
        return self.tick(now)

    def _enough_without(self, held: set[Rank]) -> bool:
        """Return whether the workers that are not held can make a round."""
        remaining = (self.members | self._arrived | held) - self.left
        return len(remaining - held) >= min(self.rule.first or self.workers, len(remaining))

    def _serve_held(self, now: float) -> list[Decision]:
        held = sorted(self._held.keys() - self.left)  # also those lost since
        self._held.clear()
        for rank in held:
            self.record.arrivals.served(rank, now)
        return [Late(self.round, rank) for rank in held]

    def tick(self, now: float) -> list[Decision]:
        """Close the open round if it has enough gradients, or if its time is over."""
        closed = self._close(now)
        # Other workers may have paused: do not hold a worker for longer than about two rounds.
        held_too_long = any(now - since > 2 * self._round_s for since in self._held.values())
        if closed or held_too_long or not self._enough_without(set(self._held)):
            closed += self._serve_held(now)
        return closed

    def _close(self, now: float) -> list[Decision]:
        members = len(self.members | self._arrived)
        open_s = now - (now if self._opened_at is None else self._opened_at)
        if not self._arrived or not self.rule.closes(
            num_arrived=len(self._arrived), members=members, open_s=open_s
        ):
            return []
        decision = Made(self.round, tuple(sorted(self._arrived)))
        self.record.made.update(self._arrived)
        for rank in self._arrived:
            self.record.arrivals.served(rank, now)
            self._dropped_last[rank] = False
        self._arrived.clear()
        self.round += 1
        self._open(now)
        self._reconsider_first()
        return [decision]

    def _reconsider_first(self) -> None:
        if self.reconsider is None:
            return
        steps = self.record.arrivals.durations
        here = {rank: steps[rank] for rank in self.members if rank in steps}
        first = self.reconsider(self.round, here, self.rule.first or self.workers)
        first = max(first, self.rule.min_first)
        if first != self.rule.first:
            self.rule = msgspec.structs.replace(self.rule, first=first)
            self.record.first.append((self.round, first))

    def _open(self, now: float) -> None:
        if self._opened_at is not None:
            self._round_s = now - self._opened_at
        self._opened_at = now
        self.record.arrivals.opened(self.round, now)
