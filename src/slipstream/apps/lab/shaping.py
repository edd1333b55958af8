"""The token bucket of a link's rate: ``tc tbf rate … burst … limit …``.

Burst
    Offloads stay on, so TCP hands ``tbf`` super-packets of up to 64 KiB. One that is larger than
    the bucket is cut into frames, which uses a core; so the bucket holds at least two. It
    must also last until a busy machine wakes up, or tokens are lost: two milliseconds.
Limit
    The queue before the link, as deep as a switch's: 50 ms, and never less than sixteen
    super-packets. With a much shorter one, a few senders to one host lose whole super-packets and
    wait for retransmission timers; with a much longer one, small messages wait seconds behind large
    ones.

``tbf`` counts every frame's headers, so TCP's payload gets 1448/1514 = 95.6% of the rate.

Delay and loss need ``netem``, which not every kernel has; the bucket then sits inside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import LaunchError
from slipstream.units import bits_per_second

Rate = str | int | float | None  # "200mbit", bits per second, or None: unshaped

SUPER_PACKET_NBYTES = 64 * 1024
WAKE_UP_S = 0.002
QUEUE_S = 0.050
LONGEST_DELAY_MS = 10_000.0
SMALL_FRAME_NBYTES = 500

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


@dataclass(frozen=True, slots=True)
class Trouble:
    """The delay and loss that ``netem`` adds to each direction of a link."""

    delay_ms: float = 0.0
    loss_percent: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.delay_ms <= LONGEST_DELAY_MS:
            raise LaunchError(f"a delay of {self.delay_ms:g} ms; take 0 to {LONGEST_DELAY_MS:g}")
        if not 0 <= self.loss_percent < 100:
            raise LaunchError(f"a loss of {self.loss_percent:g}%; take 0 or more, and below 100")

    def __bool__(self) -> bool:
        return self.delay_ms > 0 or self.loss_percent > 0

    def arguments(self, rate: Rate) -> tuple[str, ...]:
        """Return ``netem``'s arguments; its limit must have space for all packets in flight."""
        bps = _FASTEST_BPS / 10 if rate is None else bits_per_second(rate)
        in_flight = round(2 * bps / 8 * self.delay_ms / 1000 / SMALL_FRAME_NBYTES)
        return (
            *("netem", "limit", str(max(1000, in_flight)), "delay", f"{self.delay_ms:g}ms"),
            *("loss", f"{self.loss_percent:g}%"),
        )


def shapeable(rate: str | int | float) -> float:
    """Return the rate in bits per second, if ``tbf`` can shape it."""
    bps = bits_per_second(rate)
    if not _SLOWEST_BPS <= bps <= _FASTEST_BPS:
        raise LaunchError(f"a link of {bps:g} bit/s cannot be shaped; take 100kbit to 100gbit")
    return bps


def bucket(rate: str | int | float) -> Bucket:
    """Return the token bucket for a link of this rate."""
    bps = shapeable(rate)
    return Bucket(
        rate_bps=round(bps),
        burst_nbytes=max(2 * SUPER_PACKET_NBYTES, round(bps / 8 * WAKE_UP_S)),
        limit_nbytes=max(16 * SUPER_PACKET_NBYTES, round(bps / 8 * QUEUE_S)),
    )


def bucket_or_none(rate: Rate) -> tuple[str, ...]:
    """Return the arguments that shape a link of this rate, if any."""
    return ("noqueue",) if rate is None else bucket(rate).arguments


def bucket_within_netem(rate: Rate) -> tuple[str, ...]:
    """Return the place and the bucket inside ``netem``; an unshaped link gets a very fast one."""
    return (
        "parent",
        "1:1",
        "handle",
        "10:",
        *bucket(_FASTEST_BPS if rate is None else rate).arguments,
    )


def queue(rate: Rate, trouble: Trouble) -> tuple[tuple[str, ...], ...]:
    """Return the queueing disciplines, by place in a device's tree."""
    if not trouble:
        return (("root", *bucket_or_none(rate)),)
    outer = ("root", "handle", "1:", *trouble.arguments(rate))
    return (outer, bucket_within_netem(rate))
