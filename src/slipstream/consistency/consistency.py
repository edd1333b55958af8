"""A strategy's consistency: which contributions count, and when a worker may continue."""

from __future__ import annotations

import msgspec

from slipstream.consistency.admission import All, Asynchronous, StaleSynchronous
from slipstream.consistency.damping import AnyDamping, Constant
from slipstream.consistency.first_of import FirstOf
from slipstream.consistency.gates import Lag
from slipstream.consistency.k_async import KAsync
from slipstream.consistency.protocol import Progress, RoundLedger
from slipstream.parts import Facts, Part

# Every admission that a strategy may name.
AnyAdmission = All | FirstOf | StaleSynchronous | Asynchronous | KAsync


class Consistency(Part, frozen=True):
    """The rules for which contributions count and when workers may continue.

    Args:
        admit: The rule for which contributions make a round.
        gate: The rule for when a worker may begin its next round.
        damping: The factor for an old gradient's learning rate.

    >>> Consistency().lockstep, Consistency(gate=Lag(2)).lockstep
    (True, False)
    """

    admit: AnyAdmission = All()
    gate: Lag = Lag()
    damping: AnyDamping = Constant()

    def facts(self) -> Facts:
        return self.admit.facts() | self.gate.facts() | self.damping.facts()

    @property
    def lockstep(self) -> bool:
        """True if all workers make every round; a worker in another round is an error."""
        return isinstance(self.admit, All) and self.gate == Lag(0)

    @property
    def alone(self) -> bool:
        """True if every gradient is its own update, applied by the holder of the weights."""
        return isinstance(self.admit, Asynchronous)

    @property
    def agreed(self) -> bool:
        """True if holders must agree on the workers of a round before any of them closes it."""
        return self.admit.decided

    @property
    def drops_late(self) -> bool:
        """True if a contribution for a round that has closed without it is dropped."""
        return self.admit.decided and not self.admit.counts_late

    @property
    def goes_on(self) -> bool:
        """True if training continues when a worker is lost."""
        lost = "survives lost workers" in self.admit.facts()
        return lost or self.admit.decided or self.admit.counts_late

    @property
    def under_way(self) -> int:
        """The most contributions to a unit that a worker may have without a result."""
        return self.gate.under_way

    def among(self, workers: int) -> Consistency:
        """Return the same rules with values that depend on the number of workers filled in.

        Raises:
            ConfigError: The consistency is impossible with so many workers.
        """
        return msgspec.structs.replace(self, admit=self.admit.among(workers))

    def may_start(self, progress: Progress) -> bool:
        return self.gate.may_start(progress)

    def follows(self, *, seen: int, begun: int, result: int) -> bool:
        return self.admit.follows(seen=seen, begun=begun, result=result)

    def ledger(self, workers: int) -> RoundLedger:
        """Return an empty ledger for one unit."""
        return self.admit.ledger(workers, self.gate.steps)

    def rate(self, age: int) -> float:
        """Return the factor for the learning rate of a gradient that is this many updates old."""
        return self.damping.rate(age)
