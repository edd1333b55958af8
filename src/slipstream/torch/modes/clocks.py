"""Clocks: who counts a job's steps."""

from __future__ import annotations

from typing import Protocol

from slipstream.errors import RuntimeFault
from slipstream.torch.modes.pair_parts import PairParts


class Clock(Protocol):
    """Counts one pair's steps.

    Attributes:
        resumed_at: The step of the checkpoint that the job began with.
    """

    resumed_at: int

    @property
    def committed(self) -> int:
        """Steps completed; rounds committed, where a worker may miss some."""
        ...

    def next_step(self) -> int:
        """Return the number of the next step; may wait until it is known."""
        ...

    def end_step(self, step: int) -> None:
        """Check that the step was made.

        Raises:
            RuntimeFault: It was not.
        """
        ...


class StepClock:
    """This worker counts steps, because it makes every step; implements ``Clock``."""

    def __init__(self, parts: PairParts) -> None:
        self._synchronizer = parts.synchronizer
        self.resumed_at = 0

    @property
    def committed(self) -> int:
        return self._synchronizer.step

    def next_step(self) -> int:
        return self._synchronizer.step

    def end_step(self, step: int) -> None:
        if self._synchronizer.step == step:
            raise RuntimeFault(f"step {step} of job.steps ended without optimizer.step()")


class RoundClock:
    """The servers count rounds, and this worker may miss some; implements ``Clock``."""

    def __init__(self, parts: PairParts) -> None:
        self._rounds, self._steps_a_round = parts.channels.rounds, parts.plan.steps_a_round
        self._synchronizer = parts.synchronizer
        self.resumed_at = 0

    @property
    def committed(self) -> int:
        """Rounds committed, in steps, and this worker's steps since."""
        return self._step_in(0 if self._rounds is None else self._rounds.told_round)

    def next_step(self) -> int:
        """Return the next step of the round that is open; waits to learn which that is."""
        return self._step_in(0 if self._rounds is None else self._rounds.open_round())

    def _step_in(self, round_: int) -> int:
        per_round = self._steps_a_round
        begun = self.resumed_at // per_round * per_round  # a checkpoint may be within a round
        return begun + round_ * per_round + self._synchronizer.step % per_round

    def end_step(self, step: int) -> None:
        """Check nothing: a worker may miss rounds."""


def clock_of(parts: PairParts) -> StepClock | RoundClock:
    """Return the clock of a pair: servers count rounds where a worker may miss some."""
    return RoundClock(parts) if parts.plan.counts_rounds else StepClock(parts)
