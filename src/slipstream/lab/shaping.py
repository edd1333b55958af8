"""How a link's rate becomes a token bucket: ``tc tbf rate … burst … limit …``.

Burst
    Offloads stay on, so TCP hands ``tbf`` super-packets of up to 64 KiB. One that is larger than
    the bucket is cut into frames, which costs a core; the bucket therefore holds at least two. It
    also has to last until a busy machine wakes up, or tokens are lost: two milliseconds.
Limit
    The queue before the link, as deep as a switch's: 50 ms, and never fewer than sixteen
    super-packets. Much shorter and a few senders to one host lose whole super-packets and wait for
    retransmission timers; much longer and small messages wait seconds behind large ones.

``tbf`` counts every frame's headers, so TCP's payload gets 1448/1514 = 95.6% of the rate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slipstream.errors import LaunchError

Rate = str | int | float | None  # "200mbit", bits per second, or None: unshaped

SUPER_PACKET_NBYTES = 64 * 1024
WAKE_UP_S = 0.002
QUEUE_S = 0.050

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SLOWEST_BPS = 1e5  # below it one super-packet takes longer than five seconds
_FASTEST_BPS = 1e11


@dataclass(frozen=True, slots=True)
class Bucket:
    """The three numbers of a ``tbf``."""

    rate_bps: int
    burst_nbytes: int
    limit_nbytes: int

    @property
    def arguments(self) -> tuple[str, ...]:
        return (
            *("tbf", "rate", f"{self.rate_bps}bit"),
            *("burst", f"{self.burst_nbytes}b", "limit", f"{self.limit_nbytes}b"),
        )


def bits_per_second(rate: str | int | float) -> float:
    """``"200mbit"`` → 2e8; a number is taken as bits per second."""
    if isinstance(rate, str):
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg]?bit)", rate.strip().lower())
        if match is None:
            raise LaunchError(
                f"link rate {rate!r} is not understood; write it like 200mbit or 1gbit"
            )
        rate = float(match[1]) * _UNITS[match[2]]
    if not _SLOWEST_BPS <= rate <= _FASTEST_BPS:
        raise LaunchError(f"a link of {rate:g} bit/s cannot be shaped; take 100kbit to 100gbit")
    return float(rate)


def bucket(rate: str | int | float) -> Bucket:
    """The token bucket for a link of this rate."""
    bps = bits_per_second(rate)
    return Bucket(
        rate_bps=round(bps),
        burst_nbytes=max(2 * SUPER_PACKET_NBYTES, round(bps / 8 * WAKE_UP_S)),
        limit_nbytes=max(16 * SUPER_PACKET_NBYTES, round(bps / 8 * QUEUE_S)),
    )
