"""Which contributions make a round. Frozen and pure."""

from __future__ import annotations

from typing import ClassVar, Self

import msgspec

from slipstream.consistency.ledgers import AllLedger, AsyncLedger, FirstOfLedger, SspLedger
from slipstream.consistency.protocol import RoundLedger
from slipstream.errors import ConfigError
from slipstream.parts import Facts, Part, facts


class Admission(Part, frozen=True):
    """Which contributions make a round."""

    decided: ClassVar[bool] = False  # whether one holder decides for all which workers make a round

    def among(self, workers: int) -> Self:
        """The same with values that depend on the number of workers filled in.

        Raises:
            ConfigError: The rule is impossible with so many workers.
        """
        return self

    def ledger(self, workers: int, ahead: int) -> RoundLedger:
        """An empty ledger for one unit; a worker may be ``ahead`` rounds ahead of its results."""
        raise NotImplementedError

    def follows(self, *, seen: int, begun: int, result: int) -> bool:
        """Whether a worker that has the results of ``seen`` rounds, and has begun ``begun`` rounds,
        may now be sent the result of round ``result``."""
        return seen <= result


class EveryRound(Admission, frozen=True):
    """Every worker contributes to every round; see ``All`` and ``StaleSynchronous``.

    Args:
        without_lost: If a worker is lost, the remaining workers continue; else the job fails.
    """

    without_lost: bool = False

    def facts(self) -> Facts:
        return facts("survives lost workers") if self.without_lost else facts()

    def follows(self, *, seen: int, begun: int, result: int) -> bool:
        return seen == result < begun


class All(EveryRound, frozen=True):
    """A round needs the contributions of all n workers.

    Args:
        without_lost: If a worker is lost, the remaining workers continue; else the job fails.

    >>> ledger = All().ledger(workers=2, ahead=0)
    >>> ledger.arrive(rank=1, clock=0), ledger.close()
    (True, None)
    >>> ledger.arrive(rank=0, clock=0), ledger.close().contributions
    (True, ((0, 0), (0, 1)))
    """

    def facts(self) -> Facts:
        return facts("rounds of all workers") | super().facts()

    def ledger(self, workers: int, ahead: int) -> RoundLedger:
        return AllLedger(set(range(workers)), ahead=ahead)


class FirstOf(Admission, frozen=True):
    """A round closes with the first N complete gradients, the same ones at every holder.

    The other gradients are dropped; their workers join the round that is open then.

    Args:
        first: N.
        backup: How many workers a round does not wait for; N is the number of the others.
        adapts: N is found during the run.
        close_after_s: A round also closes after this time with the gradients that have arrived.
        min_first: But not with fewer than these.

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
        """The same with N filled in."""
        first = workers - (self.backup or 0) if self.first is None else self.first
        if workers == 1:
            first = 1  # the script runs as one process
        if not 1 <= first <= workers:
            asked = f"backup={self.backup}" if self.first is None else f"first={self.first}"
            allowed = f"1 to {workers}" if self.first is not None else f"0 to {workers - 1}"
            raise ConfigError(f"{asked} with {workers} workers: choose from {allowed}")
        changed = {"first": first, "backup": None, "min_first": min(self.min_first, first)}
        return msgspec.structs.replace(self, **changed)

    def ledger(self, workers: int, ahead: int) -> RoundLedger:
        return FirstOfLedger()

    def closes(self, *, came: int, members: int, open_s: float) -> bool:
        """Whether a round is complete that has ``came`` of ``members`` contributions after this
        time."""
        if came >= min(self.first or members, members):
            return True
        return (
            self.close_after_s is not None
            and open_s >= self.close_after_s
            and came >= self.min_first
        )


class StaleSynchronous(EveryRound, frozen=True):
    """Round t closes when all workers have pushed clock t. It also contains gradients of later
    clocks, as many as the gate allows, that faster workers have already pushed (SSP).

    When a slow worker leaves, rounds that waited only for it close empty.

    Args:
        without_lost: If a worker is lost, the remaining workers continue; else the job fails.

    >>> ledger = StaleSynchronous().ledger(workers=2, ahead=1)
    >>> [ledger.arrive(rank, clock) for rank, clock in ((0, 0), (0, 1), (1, 0))]
    [True, True, True]
    >>> ledger.close().contributions  # by clock and rank
    ((0, 0), (0, 1), (1, 0))
    """

    def facts(self) -> Facts:
        return facts("stale-synchronous rounds") | super().facts()

    def ledger(self, workers: int, ahead: int) -> RoundLedger:
        return SspLedger(ahead, dict.fromkeys(range(workers), 0))


class Asynchronous(Admission, frozen=True):
    """Every gradient is its own update, applied when it arrives.

    Args:
        ramp_up: Worker k of n begins after k/n of so many updates, so that staleness grows slowly.

    Raises:
        ConfigError: ``ramp_up`` is negative or no whole number.

    >>> ledger = Asynchronous().ledger(workers=2, ahead=0)
    >>> ledger.arrive(rank=1, clock=0), ledger.close().audience
    (True, (1,))
    """

    ramp_up: int = 0

    def __post_init__(self) -> None:
        if type(self.ramp_up) is not int or self.ramp_up < 0:
            raise ConfigError(f"ramp_up={self.ramp_up!r}: give a number of updates, 0 or more")

    def facts(self) -> Facts:
        ramp = facts("ramps up") if self.ramp_up else facts()
        return facts("each gradient is an update") | ramp

    def ledger(self, workers: int, ahead: int) -> RoundLedger:
        return AsyncLedger([rank * self.ramp_up // workers for rank in range(workers)])


# Every admission that a strategy may name.
AnyAdmission = All | FirstOf | StaleSynchronous | Asynchronous
