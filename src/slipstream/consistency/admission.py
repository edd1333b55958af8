"""Admission rules: which contributions make a round. Frozen and pure."""

from __future__ import annotations

from typing import ClassVar, Self

from slipstream.consistency.decisions import Decider, Reconsider
from slipstream.consistency.ledgers import AllLedger, AsyncLedger, SspLedger
from slipstream.consistency.protocol import RoundLedger
from slipstream.errors import ConfigError
from slipstream.parts import Facts, Part, facts


class Admission(Part, frozen=True):
    """A rule for which contributions make a round."""

    decided: ClassVar[bool] = False  # one holder decides for all which workers make a round
    # A contribution whose round has closed still counts: in a later round.
    counts_late: ClassVar[bool] = False

    def among(self, workers: int) -> Self:
        """Return the same rule with values that depend on the number of workers filled in.

        Raises:
            ConfigError: The rule is impossible with so many workers.
        """
        return self

    def ledger(self, workers: int, ahead: int) -> RoundLedger:
        """Return an empty ledger; a worker may be ``ahead`` rounds ahead of its results."""
        raise NotImplementedError

    def decider(
        self, workers: int, holders: int, reconsider: Reconsider | None = None
    ) -> Decider | None:
        """Return the initial state of decisions for all holders; None if each holder closes rounds.

        Args:
            workers: The number of workers.
            holders: The number of holders that report arrivals.
            reconsider: Chooses how many workers make the next round, if the rule adapts.
        """
        return None

    def instead_if_absent(self, workers: int) -> tuple[str, ...]:
        """Return arguments with which no round waits for workers that are elsewhere in the loop;
        empty if no round does so anyway."""
        return ()

    def follows(self, *, seen: int, begun: int, result: int) -> bool:
        """Return whether a worker may now be sent the result of round ``result``, if it has the
        results of ``seen`` rounds and has begun ``begun`` rounds."""
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


class StaleSynchronous(EveryRound, frozen=True):
    """Close round t when all workers have pushed clock t (SSP).

    The round also contains gradients of later clocks that faster workers have already pushed, as
    many as the gate allows.

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
        ramp_up: Worker k of n starts after k/n of so many updates, so that staleness grows slowly.

    Raises:
        ConfigError: ``ramp_up`` is negative or not a whole number.

    >>> ledger = Asynchronous().ledger(workers=2, ahead=0)
    >>> ledger.arrive(rank=1, clock=0), ledger.close().audience
    (True, (1,))
    """

    ramp_up: int = 0

    counts_late: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.ramp_up) is not int or self.ramp_up < 0:
            raise ConfigError(f"ramp_up={self.ramp_up!r}: give a number of updates, 0 or more")

    def facts(self) -> Facts:
        ramp = facts("ramps up") if self.ramp_up else facts()
        return facts("each gradient is an update") | ramp

    def ledger(self, workers: int, ahead: int) -> RoundLedger:
        return AsyncLedger([rank * self.ramp_up // workers for rank in range(workers)])
