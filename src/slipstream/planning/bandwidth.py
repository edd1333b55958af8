"""Available bandwidth of a path: self-loading periodic streams (SLoPS), and passive measurement.

Jain & Dovrolis, "End-to-end available bandwidth" (2003), which Parameter Flow's section 3.3.3 uses
to distinguish sufficient links from insufficient ones. A stream of K packets is sent at a constant
rate R. If R is above A, the available bandwidth, a queue grows somewhere and every packet is
delayed a little more than the one before; if not, delays stay level. So:

    trend(stream)     one stream: does its delay increase?
    vote(trends)      a fleet of streams at one rate: is R above A, below, or in the grey region?
    Search            bisection over R: next_rate(search), after(search, verdict)

The delays come from two clocks that are not synchronized, so only differences count; a drift
of less than LARGEST_SKEW does not count as a queue.

``knee`` evaluates a train of packets sent as fast as possible: it gives the rate behind a token
bucket, and the bucket's size. A stream that starts with a full bucket sees no queue until the
bucket is empty, whatever its rate.

Rates are bytes/s throughout. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from statistics import median

from slipstream.errors import ConfigError

# Pathload's thresholds: above the first a test means "increasing", below the second "not".
PCT_THRESHOLDS = (0.66, 0.54)
PDT_THRESHOLDS = (0.55, 0.45)
# Clocks kept by NTP drift apart by at most 500 ppm, whereas a stream that is 1% too fast is
# delayed by another 10,000 ppm of its length.
LARGEST_SKEW = 0.001
# A queue that overflows does not grow any more: such losses are another sign.
LARGEST_LOSS = 0.1
FEWEST_DELAYS = 9  # three groups of three


class Trend(Enum):
    """The trend of one stream's delays."""

    INCREASING = "increasing"
    LEVEL = "level"
    AMBIGUOUS = "ambiguous"


class Verdict(Enum):
    """A fleet's rate, compared with the available bandwidth."""

    ABOVE = "above"
    BELOW = "below"
    GREY = "grey"


# ---- one stream


def trend(sent_s: Sequence[float], arrived_s: Sequence[float | None]) -> Trend:
    """Return whether delays increase, from the times of sending and of arrival (None: lost).

    The two clocks may differ by any offset. The order of arrival does not matter.
    """
    pairs = [
        (at, arrived) for at, arrived in zip(sent_s, arrived_s, strict=True) if arrived is not None
    ]
    if len(pairs) < (1 - LARGEST_LOSS) * len(sent_s):
        return Trend.INCREASING
    if len(pairs) < FEWEST_DELAYS:
        return Trend.AMBIGUOUS
    # Relative to the first packet: a float of seconds since 1970 cannot represent nanoseconds.
    first_sent, first_arrived = pairs[0]
    middles = group_medians(
        [(arrived - first_arrived) - (at - first_sent) for at, arrived in pairs]
    )
    if middles[-1] - middles[0] <= LARGEST_SKEW * (pairs[-1][0] - first_sent):
        return Trend.LEVEL
    return _combined(
        _classify(pct(middles), PCT_THRESHOLDS), _classify(pdt(middles), PDT_THRESHOLDS)
    )


def group_medians(delays: Sequence[float]) -> list[float]:
    """Return √K medians of √K neighbours each, so that single delayed packets do not matter."""
    groups = math.isqrt(len(delays))
    edges = [len(delays) * index // groups for index in range(groups + 1)]
    return [median(delays[low:high]) for low, high in pairwise(edges)]


def pct(middles: Sequence[float]) -> float:
    """Return the share of increases (pairwise comparison test). Level: about 0.5, or 0 if exact."""
    steps = [later > earlier for earlier, later in pairwise(middles)]
    return sum(steps) / len(steps)


def pdt(middles: Sequence[float]) -> float:
    """Return net change over total change, −1 to 1 (pairwise difference test). Level: about 0."""
    travelled = sum(abs(b - a) for a, b in pairwise(middles))
    return (middles[-1] - middles[0]) / travelled if travelled else 0.0


def _classify(value: float, thresholds: tuple[float, float]) -> Trend:
    increasing, level = thresholds
    if value > increasing:
        return Trend.INCREASING
    return Trend.LEVEL if value < level else Trend.AMBIGUOUS


def _combined(one: Trend, other: Trend) -> Trend:
    """Combine two tests: one may be unsure; two that contradict each other give no result."""
    clear = {one, other} - {Trend.AMBIGUOUS}
    return clear.pop() if len(clear) == 1 else Trend.AMBIGUOUS


# ---- a fleet


def vote(trends: Sequence[Trend], *, agreeing: float = 0.7) -> Verdict:
    """Return the vote of all streams at one rate, if at least half are unambiguous."""
    rising = trends.count(Trend.INCREASING)
    voters = rising + trends.count(Trend.LEVEL)
    if 2 * voters < len(trends) or not voters:
        return Verdict.GREY
    if rising >= agreeing * voters:
        return Verdict.ABOVE
    return Verdict.BELOW if voters - rising >= agreeing * voters else Verdict.GREY


def decided(trends: Sequence[Trend], fleet: int, *, agreeing: float = 0.7) -> bool:
    """Return whether the rest of a fleet could not change its vote, and need not be sent."""
    rest = fleet - len(trends)
    outcomes = {
        vote([*trends, *[last] * rest], agreeing=agreeing)
        for last in (Trend.INCREASING, Trend.LEVEL, Trend.AMBIGUOUS)
    }
    return len(outcomes) == 1


# ---- all rates


@dataclass(frozen=True, slots=True)
class Search:
    """Bisection between ``low``, which was below the available bandwidth, and ``high``, above it.

    Rates at which a fleet disagreed make up the grey region between them: the available bandwidth
    varied around these. It is part of the result; the search continues outside of it.
    ``resolution`` is relative to ``high``.
    """

    low: float
    high: float
    resolution: float = 0.1
    most_fleets: int = 16
    grey: tuple[float, float] | None = None
    fleets: int = 0
    # A limit that was passed to the search is not a measured one.
    low_seen: bool = False
    high_seen: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high < math.inf:
            raise ConfigError(
                f"a search from {self.low:g} to {self.high:g} bytes/s: give rates, the lower first"
            )
        if not 0.001 <= self.resolution < 1:
            raise ConfigError(
                f"resolution={self.resolution:g}: give 0.001 to 1, a share of the rate"
            )
        if self.most_fleets < 1:
            raise ConfigError(f"most_fleets={self.most_fleets}: one at least has to be sent")


def next_rate(search: Search) -> float | None:
    """Return the next fleet's rate; None when the range is within the resolution."""
    if search.fleets >= search.most_fleets:
        return None
    width = search.resolution * search.high
    grey_low, grey_high = search.grey or (search.high, search.high)
    if search.grey is not None and search.high - grey_high > width:
        return (grey_high + search.high) / 2
    return (search.low + grey_low) / 2 if grey_low - search.low > width else None


def after(search: Search, verdict: Verdict) -> Search:
    """Return the search after the vote of the fleet at ``next_rate(search)``."""
    rate = next_rate(search)
    if rate is None:
        raise ValueError("the search is over: no fleet was due")
    search = replace(search, fleets=search.fleets + 1)
    if verdict is Verdict.GREY:
        low, high = search.grey or (rate, rate)
        return replace(search, grey=(min(low, rate), max(high, rate)))
    # A clear vote on the far side of the grey region means that it has moved.
    if verdict is Verdict.ABOVE:
        grey = search.grey if search.grey is not None and search.grey[1] < rate else None
        return replace(search, high=rate, high_seen=True, grey=grey)
    grey = search.grey if search.grey is not None and search.grey[0] > rate else None
    return replace(search, low=rate, low_seen=True, grey=grey)


@dataclass(frozen=True, slots=True)
class Available:
    """The available bandwidth of a path during its measurement.

    An end that was not found is the limit of the search: ``low_bytes_s`` is then 0, and
    ``high_bytes_s`` the highest rate that was allowed or that could be paced.
    """

    low_bytes_s: float
    high_bytes_s: float
    low_seen: bool
    high_seen: bool
    ended: str
    fleets: int
    streams: int
    late_streams: int  # not sent at an even pace; they did not vote
    sent_nbytes: int
    seconds: float
    fastest_bytes_s: float
    burst_nbytes: int

    @property
    def mean_bytes_s(self) -> float:
        return (self.low_bytes_s + self.high_bytes_s) / 2

    def sufficient(self, threshold_bytes_s: float) -> bool | None:
        """Return whether the threshold is available; None if it lies within the range."""
        if self.low_bytes_s >= threshold_bytes_s:
            return True
        return False if self.high_seen and self.high_bytes_s < threshold_bytes_s else None


# ---- a train


@dataclass(frozen=True, slots=True)
class Knee:
    """The rate of a train after the path's burst allowance is used up, and that allowance."""

    rate_bytes_s: float
    burst_nbytes: int
    train_nbytes: int

    @property
    def clear(self) -> bool:
        """True if the train was long enough after the knee."""
        return 2 * self.burst_nbytes <= self.train_nbytes


def knee(arrived_s: Sequence[float | None], packet_nbytes: int) -> Knee | None:
    """Return the knee of a train sent as fast as possible; None if too little of it arrived.

    Bytes that have arrived by time t are at most burst + rate·t. The last third gives the rate, the
    packet that is furthest ahead of it gives the burst.
    """
    times = sorted(at for at in arrived_s if at is not None)
    if len(times) < FEWEST_DELAYS:
        return None
    tail = times[-(len(times) // 3) :]
    spent_s = tail[-1] - tail[0]
    rate = (len(tail) - 1) * packet_nbytes / spent_s if spent_s > 0 else math.inf
    if math.isinf(rate):
        return Knee(rate, 0, len(times) * packet_nbytes)
    ahead = (index * packet_nbytes - rate * (at - times[0]) for index, at in enumerate(times))
    return Knee(rate, max(0, round(max(ahead))), len(times) * packet_nbytes)


# ---- passive measurement


class Passive:
    """An estimate of a link's rate from its transfers.

    ``tell`` takes the bytes of a transfer and how long the link was busy with it: from the first
    byte to the last, without time in which there was nothing to send. The estimate is

        Σ wᵢ bytesᵢ / Σ wᵢ secondsᵢ,   w halved by every ``half_life_s`` of busy time since.

    So it is a mean over busy time, in which a slow second counts as much as a fast one. Idle time
    does not change the estimate. Transfers of less than ``least_nbytes`` are ignored: their time is
    mostly latency. If there are only such transfers, the estimate is None.

    Probing measures the available bandwidth; this measures the used one. On a link that is never
    full it shows less than the link has: to test a threshold that transfers do not reach, use a
    probe.
    """

    def __init__(
        self, *, half_life_s: float = 2.0, least_nbytes: int = 64 * 1024, margin: float = 0.1
    ) -> None:
        if not 0 < half_life_s < math.inf:
            raise ConfigError(f"half_life_s={half_life_s:g}: give seconds, more than 0")
        if least_nbytes < 1:
            raise ConfigError(f"least_nbytes={least_nbytes}: give 1 or more")
        if not 0 <= margin < 1:
            raise ConfigError(
                f"margin={margin:g}: give a share of the threshold, 0 or more, below 1"
            )
        self._half_life_s = half_life_s
        self._least_nbytes = least_nbytes
        self._margin = margin
        self._nbytes = 0.0
        self._seconds = 0.0
        self._answer: tuple[float, bool] | None = None  # for a threshold

    def tell(self, nbytes: int, busy_s: float) -> None:
        """Enter a transfer of ``nbytes`` that kept the link busy for ``busy_s``."""
        if nbytes < 0 or not 0 <= busy_s < math.inf:
            raise ValueError(f"{nbytes} bytes in {busy_s} s: no transfer is like that")
        if nbytes < self._least_nbytes or not busy_s:
            return
        share = 0.5 ** (busy_s / self._half_life_s)
        # The start of a transfer is older than its end: its weight is the mean over its duration.
        weight = (1 - share) / math.log(2) * self._half_life_s / busy_s
        self._nbytes = share * self._nbytes + weight * nbytes
        self._seconds = share * self._seconds + weight * busy_s

    @property
    def bytes_s(self) -> float | None:
        """The estimate; None until a transfer was large enough."""
        return self._nbytes / self._seconds if self._seconds else None

    def sufficient(self, threshold_bytes_s: float) -> bool | None:
        """Return whether the link reaches the threshold; None if nothing is known.

        The answer changes only when the estimate is past the threshold by ``margin``, so that an
        estimate near the threshold does not change the answer with every transfer.
        """
        rate = self.bytes_s
        if rate is None:
            return None
        bar = threshold_bytes_s
        if self._answer is not None and self._answer[0] == threshold_bytes_s:
            bar *= 1 - self._margin if self._answer[1] else 1 + self._margin
        self._answer = (threshold_bytes_s, rate >= bar)
        return self._answer[1]
