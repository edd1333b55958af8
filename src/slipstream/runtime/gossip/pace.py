"""The number of partitions, computed from measured step times and link rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from slipstream.methods import PartialExchange
from slipstream.planning.slices import WORTH_CHANGING, Load
from slipstream.transports.protocol import Transport

TICK_S = 2.0  # interval of measurements, and their smallest number of steps
LOOK_STEPS = 10
BUSY = 0.25  # share of the time that a link must be busy to show a higher rate
FULL_TIME = 0.5  # the same for a lower rate: a busy processor delays partitions, too
CALM_LOOKS = 15  # without a delay, before a higher rate is tried
MOST_LOOKS = 240
LEAST_LEFT = 0.1  # smallest share of the known rate after one measurement
A_LITTLE_MORE = 1.3  # factor of a trial; enough to change p
NO_STEP = 5.0  # times the median: the worker was not training, but evaluating, say


class Pace:
    """A rule that returns p after every step; a given p does not change.

    The rate is the bytes acknowledged on all links divided by the time that the busiest link was
    busy: the links share this host's connection. A higher rate than before counts only if that link
    was busy for long, since short transfers pass a shaper's bucket at full speed. A lower rate
    counts only if partitions had to wait. So when none has waited for long, a slightly higher rate
    is tried; again soon if that succeeds, and later if not.

    Args:
        rule: The rule of partial exchange.
        model_bytes: The bytes of the trained weights.
        peers: The names of the peers.
        bytes_s: The rate of a link, until it is measured.
        transport: The transport, which counts what has arrived.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        rule: PartialExchange,
        model_bytes: int,
        peers: Sequence[str],
        bytes_s: float,
        transport: Transport,
        clock: Callable[[], float],
    ) -> None:
        self.load: Load | None = None  # the last measured load
        self._basis: Load | None = None  # the load from which p was computed
        self._rule, self._model_bytes, self.bytes_s = rule, model_bytes, bytes_s
        self._peers = list(peers)
        self._transport, self._clock = transport, clock
        # Until steps have been timed: as few bytes as a synchronous round would take.
        self.partitions = rule.partitions or max(1, len(peers))
        self._begun_s = self._stepped_s = clock()
        self._steps_s: list[float] = []  # duration of each, without waiting
        self._has_waited = False
        self._calm = 0  # measurements in which no partition had to wait
        self._patience = CALM_LOOKS
        self._trying = False
        self._before = self._delivered()

    def stepped(self, waited_s: float, has_waited: bool) -> int:
        """Record a step's wait for peers, and whether partitions had to wait; return p."""
        now = self._clock()
        self._steps_s.append(max(0.0, now - self._stepped_s - waited_s))
        self._stepped_s = now
        self._has_waited = self._has_waited or has_waited
        elapsed_s = now - self._begun_s
        if len(self._steps_s) >= LOOK_STEPS and elapsed_s >= (TICK_S if self.load else 0.0):
            self._look(elapsed_s)
        return self.partitions

    def lose(self, peer: str) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            self._before.pop(peer, None)

    def gain(self, peer: str) -> None:
        self._peers.append(peer)
        self._before[peer] = (0, 0.0)

    def _look(self, elapsed_s: float) -> None:
        if self._rule.bytes_s is None:
            self._listen(elapsed_s)
        self.load = Load(
            1 / max(1e-9, usual_s(self._steps_s)),
            self._model_bytes,
            len(self._peers) + 1,
            self.bytes_s,
        )
        if self._basis is None or self._basis.differs(self.load):
            self._basis = self.load
            if self._rule.partitions is None:
                # A partition has at least one value.
                self.partitions = min(self.load.partitions(), max(1, self._model_bytes // 4))
        self._begun_s, self._steps_s, self._has_waited = self._clock(), [], False

    def _listen(self, elapsed_s: float) -> None:
        """Update the rate from the transfers since the last measurement."""
        now = self._delivered()
        transfers = [
            (now[peer][0] - nbytes, now[peer][1] - seconds)
            for peer, (nbytes, seconds) in self._before.items()
            if now[peer][0] >= nbytes  # otherwise it is a new connection
        ]
        self._before = now
        nbytes, busy_s = sum(n for n, _ in transfers), max((s for _, s in transfers), default=0.0)
        measured = nbytes / busy_s if busy_s > 0 else 0.0
        self._calm = 0 if self._has_waited else self._calm + 1
        before = self.bytes_s
        share = busy_s / elapsed_s
        if (self._has_waited and share > FULL_TIME) or (measured > self.bytes_s and share > BUSY):
            # A link that stopped for a while has not become slow for ever.
            self.bytes_s = max(measured, self.bytes_s * LEAST_LEFT)
        if self._has_waited and self._trying:
            self._patience, self._trying = min(2 * self._patience, MOST_LOOKS), False
        elif self._has_waited:
            self._patience = CALM_LOOKS if narrowed(before, self.bytes_s) else self._patience
        elif self._calm >= (1 if self._trying else self._patience) and self.partitions > 1:
            self.bytes_s *= A_LITTLE_MORE
            self._calm, self._trying = 0, True

    def _delivered(self) -> dict[str, tuple[int, float]]:
        return {peer: self._transport.delivered(peer) for peer in self._peers}

    def account(self) -> dict[str, Any]:
        if self.load is None:
            return {"partitions": self.partitions}
        return {
            "partitions": self.partitions,
            "predicted_bytes_s": self.load.used_bytes_s(self.partitions),
            "link_bytes_s": self.load.bytes_s,
            "steps_s": self.load.steps_s,
        }


def usual_s(durations_s: Sequence[float]) -> float:
    """Return the mean of the durations, without outliers that were more than a step."""
    most_s = NO_STEP * median(durations_s)
    return fmean(each for each in durations_s if each <= most_s)


def narrowed(before: float, now: float) -> bool:
    return now < (1 - WORTH_CHANGING) * before
