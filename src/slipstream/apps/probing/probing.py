"""Measurement of available bandwidth: trains and fleets of streams, and a bisection."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from itertools import compress

from slipstream.apps.probing.listener import Counts, Listener
from slipstream.apps.probing.packets import LOOPBACK, MOST_PACKETS, PORT
from slipstream.apps.probing.udp_streams import TOLERABLE_LAG_S, Flight, Shape, Streams
from slipstream.errors import ConfigError, WaitLimit
from slipstream.planning.bandwidth import (
    Available,
    Knee,
    Search,
    Trend,
    Verdict,
    after,
    decided,
    knee,
    next_rate,
    trend,
    vote,
)
from slipstream.units import human_bytes

__all__ = ["LOOPBACK", "PORT", "Counts", "Listener", "measure"]

# Trains double in length until one shows the path's rate. Between them a bucket fills up again.
_SHORTEST_TRAIN = 64
_SHORTEST_REST_S = 0.25
_LONGEST_REST_S = 2.0
# The share of the maximum sending speed at which packets can still be paced.
_PACEABLE = 0.8
# The available bandwidth is at most a train's own rate, which has some error.
_ABOVE_TRAIN = 1.25
# More than needed. Too much creates a queue that drains, and too little leaves some of the bucket,
# during the first third of a stream; that third does not count.
_OVERFILL = 1.25
# The most times that a stream is sent, on average over a fleet, before the prober gives up.
_MOST_ATTEMPTS = 3
LEAST_TRAFFIC_NBYTES = 10_000_000


class _Spent(Exception):
    """A limit of the measurement that is reached; the measurement ends with what is known."""


@dataclass(slots=True)
class _Allowance:
    """The packets and the time that a measurement has left, and the number of streams sent."""

    streams: Streams
    at_most_nbytes: int
    until_s: float
    flown: int = 0
    late: int = 0

    def spent(self, shape: Shape, fill: int = 0) -> str:
        """Return the limit that such a stream would exceed; empty if none."""
        cost_nbytes = self.streams.cost_nbytes(shape, fill)
        if self.streams.sent_nbytes + cost_nbytes > self.at_most_nbytes:
            return "traffic"
        return "time" if time.monotonic() + shape.seconds > self.until_s else ""

    def send(self, shape: Shape, fill: int = 0) -> Flight:
        if limit := self.spent(shape, fill):
            raise _Spent(limit)
        return self.streams.send(shape, fill)

    def send_stream(self, shape: Shape, path: _Path) -> Trend | None:
        """Send a stream; return None if this machine was too busy to pace it."""
        frame_nbytes = self.streams.largest_frame_nbytes
        fill = path.fill(frame_nbytes)
        flight = self.send(shape, fill)
        emptied = path.emptied(fill * frame_nbytes, flight.filled_s)
        trend = trend_of(flight) if emptied else None
        self.flown += 1
        self.late += trend is None
        return trend


def measure(
    host: str,
    port: int = PORT,
    secret: bytes | None = None,
    *,
    least_bytes_s: float = 125e3,
    most_bytes_s: float = 125e6,
    resolution: float = 0.1,
    fleet: int = 8,
    at_most_nbytes: int = 200_000_000,
    limit_s: float = 60.0,
    answer_limit_s: float = 5.0,
) -> Available:
    """Measure the available bandwidth of the path from here to a listener, in bytes/s.

    It ends when the range is within ``resolution`` of its upper end, or when ``at_most_nbytes``
    were sent, or after ``limit_s``: ``Available.ended`` has the reason. Rates below
    ``least_bytes_s``, above ``most_bytes_s`` and above what this machine can pace are not tried.
    """
    if at_most_nbytes < LEAST_TRAFFIC_NBYTES:
        raise ConfigError(
            f"at most {human_bytes(at_most_nbytes)}: a measurement takes "
            f"{human_bytes(LEAST_TRAFFIC_NBYTES)} at the least, and up to five times that as a rule"
        )
    if fleet < 1:
        raise ConfigError(f"fleet={fleet}: one stream at least has to be sent")
    limits = Search(least_bytes_s, most_bytes_s, resolution)
    begun_s = time.monotonic()
    with Streams(host, port, secret, answer_limit_s) as streams:
        allowance = _Allowance(streams, at_most_nbytes, begun_s + limit_s)
        try:
            path = _send_trains(allowance)
        except _Spent:
            raise WaitLimit("a path's rate to be seen", limit_s, [f"{host}:{port}"]) from None
        search, ended = _bisect(allowance, path.within(limits), path, fleet)
        return Available(
            search.low if search.low_seen else 0.0,
            search.high,
            low_seen=search.low_seen,
            high_seen=search.high_seen,
            ended=ended,
            fleets=search.fleets,
            streams=allowance.flown,
            late_streams=allowance.late,
            sent_nbytes=streams.sent_nbytes,
            seconds=time.monotonic() - begun_s,
            fastest_bytes_s=path.fastest_bytes_s,
            burst_nbytes=path.burst_nbytes,
        )


@dataclass(frozen=True, slots=True)
class _Path:
    """The results of trains: how fast this machine can send, and the path's rate and bucket."""

    fastest_bytes_s: float
    seen: Knee | None  # None if trains arrived as fast as sent, or not at all

    @property
    def burst_nbytes(self) -> int:
        return 0 if self.seen is None else self.seen.burst_nbytes

    def fill(self, frame_nbytes: int) -> int:
        """Return the number of packets that empty the bucket, although it fills meanwhile."""
        if self.seen is None:
            return 0
        share = 1 - self.seen.rate_bytes_s * _PACEABLE / self.fastest_bytes_s
        return min(MOST_PACKETS, math.ceil(_OVERFILL * self.burst_nbytes / share / frame_nbytes))

    def emptied(self, fill_nbytes: int, filled_s: float) -> bool:
        """Return whether the bucket is empty: not if the sender was delayed meanwhile."""
        refilled = 0.0 if self.seen is None else self.seen.rate_bytes_s * filled_s
        return fill_nbytes - refilled >= self.burst_nbytes

    def within(self, limits: Search) -> Search:
        high = min(limits.high, self.fastest_bytes_s)
        if self.seen is not None:
            high = min(high, _ABOVE_TRAIN * self.seen.rate_bytes_s)
        return replace(limits, low=min(limits.low, high / 2), high=high)


def _bisect(allowance: _Allowance, search: Search, path: _Path, fleet: int) -> tuple[Search, str]:
    """Return the search at its end, and the reason of the end."""
    shape = allowance.streams.shape
    try:
        while (rate := next_rate(search)) is not None:
            search = after(search, _send_fleet(allowance, shape(rate), path, fleet))
    except _Spent as limit:
        return search, str(limit)
    return search, "fleets" if search.fleets == search.most_fleets else "resolution"


def _send_trains(allowance: _Allowance) -> _Path:
    """Send packets as fast as possible, until a train is long enough to show the path's own rate.

    Only after a train that showed the rate, the pause is known to fill the bucket. A bucket that
    was not full looks smaller than it is, so the largest one counts.
    """
    packets, fastest_bytes_s, rest_s = _SHORTEST_TRAIN, 0.0, _SHORTEST_REST_S
    knees: list[Knee] = []
    while packets <= MOST_PACKETS:
        shape = Shape(packets, allowance.streams.largest_frame_nbytes, 0.0)
        if fastest_bytes_s:  # not the first
            time.sleep(rest_s)
            if allowance.spent(shape):
                break
        flight = _send_train(allowance, shape, rest_s)
        fastest_bytes_s = max(fastest_bytes_s, _PACEABLE * flight.sent_bytes_s)
        shown = _seen_by(flight, fastest_bytes_s)
        if shown is not None:
            knees.append(shown)
            rest_s = _rest_s(shown)
            if shown.clear and len(knees) > 1:
                break
        packets *= 1 if shown is not None and shown.clear else 2
    if not knees:
        return _Path(fastest_bytes_s, None)
    burst_nbytes = max(shown.burst_nbytes for shown in knees)
    return _Path(fastest_bytes_s, replace(knees[-1], burst_nbytes=burst_nbytes))


def _rest_s(shown: Knee) -> float:
    """Return a pause in which the bucket fills, even if other traffic uses most of the link."""
    filled_s = 4 * shown.train_nbytes / shown.rate_bytes_s
    return min(max(filled_s, _SHORTEST_REST_S), _LONGEST_REST_S)


def _seen_by(train: Flight, fastest_bytes_s: float) -> Knee | None:
    """Return the path's knee; None if the train arrived as fast as any can be sent.

    The train's own sending speed is no measure: if a full link uses the sender's core, a train
    slows down as soon as the bucket is empty.
    """
    shown = knee(train.arrived_s, train.shape.frame_nbytes) if train.unbroken else None
    return shown if shown is not None and shown.rate_bytes_s < fastest_bytes_s else None


def _send_train(allowance: _Allowance, shape: Shape, rest_s: float) -> Flight:
    """Send a train. While a sender is delayed the bucket fills; such a train is repeated."""
    flight = allowance.send(shape)
    for _ in range(_MOST_ATTEMPTS - 1):
        if flight.unbroken:
            break
        time.sleep(rest_s)
        if allowance.spent(shape):
            break
        flight = allowance.send(shape)
    return flight


def _send_fleet(allowance: _Allowance, shape: Shape, path: _Path, fleet: int) -> Verdict:
    """Send streams until the vote is decided, each followed by a pause of its own length.

    A stream that this machine was too busy to pace is sent again, within limits.
    """
    trends: list[Trend] = []
    for _ in range(_MOST_ATTEMPTS * fleet):
        if decided(trends, fleet):
            break
        trend = allowance.send_stream(shape, path)
        if trend is not None:
            trends.append(trend)
        time.sleep(shape.seconds)
    return vote([*trends, *[Trend.AMBIGUOUS] * (fleet - len(trends))])


def trend_of(flight: Flight) -> Trend | None:
    """Return the trend of the packets sent in time; None if they are less than a quarter of any
    third.

    A sender that was delayed and never caught up has not sent at the rate. The first third is still
    affected by what was sent before the stream, and is ignored.
    """
    tolerable_s = max(TOLERABLE_LAG_S, flight.shape.gap_ns / 1e9)
    due_s = (index * flight.shape.gap_ns / 1e9 for index in range(flight.shape.packets))
    in_time = [sent - due <= tolerable_s for sent, due in zip(flight.sent_s, due_s, strict=True)]
    third = flight.shape.packets // 3
    if any(4 * sum(in_time[part * third :][:third]) < third for part in range(3)):
        return None
    in_time[:third] = [False] * third
    return trend(list(compress(flight.sent_s, in_time)), list(compress(flight.arrived_s, in_time)))
