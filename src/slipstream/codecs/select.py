"""Rules that select which entries of an accumulated tensor to send now. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import numpy as np

from slipstream.codecs.residual import Floats
from slipstream.errors import ConfigError
from slipstream.parts import Facts, Part, facts
from slipstream.types import EncodeContext, Values

# The bytes of a filter's frame, from the number of its values and the number that are sent.
Packed = Callable[[int, int], float]

Decay = Literal["rate", "root", "constant"]
SAMPLES = 4096  # the sampled share is nearly always within two points of the exact one


def _check_bound(name: str, bound: object) -> None:
    if isinstance(bound, Drop):
        return
    if not (isinstance(bound, int | float) and math.isfinite(bound) and bound >= 0):
        raise ConfigError(
            f"{name}={bound!r}: give a bound on what may stay behind, finite and not negative, "
            "or the share of entries to hold back, as Drop(0.8)"
        )


class Bound(NamedTuple):
    """A bound: entries above it are sent, and the first ``ties`` of those equal to it."""

    above: float
    ties: int = 0


class Drop(Part, frozen=True):
    """Hold back a share of the entries; the bound is estimated each time from a sample.

    The bound is the largest that holds back no more than the share. Equal entries are all sent: if
    they were held back, a tensor of equal entries would wait for ever. If more than the share are
    zero, all other entries are sent.

    Args:
        ratio: The share, at least 0 and less than 1.

    Raises:
        ConfigError: The ratio is out of range.

    >>> four = Values(np.float32([1, 2, 3, 4]).view(np.uint8), "float32")
    >>> Drop(0.5).bound(four, np.zeros(4, np.float32), clock=1)  # 3 and 4 are sent
    2.0
    """

    ratio: float

    def __post_init__(self) -> None:
        if not (isinstance(self.ratio, int | float) and 0 <= self.ratio < 1):
            raise ConfigError(
                f"Drop(ratio={self.ratio!r}): give the share of entries to hold back, "
                "at least 0 and less than 1"
            )

    def bound(self, values: Values, memory: Floats, clock: int) -> float:
        """Return the bound for values plus memory, from every ``stride``-th entry."""
        # Odd, so that the sample does not hit the same columns of a matrix again and again.
        stride = max(1, values.numel // SAMPLES) | 1
        sample = slice(clock % stride, None, stride)
        with np.errstate(over="ignore", invalid="ignore"):
            acc = np.abs(values.data.view(np.float32)[sample] + memory[sample])
        acc = np.sort(acc[np.isfinite(acc)])
        if acc.size == 0:
            return 0.0
        least_to_travel = acc[int(self.ratio * acc.size)]
        held_back = int(np.searchsorted(acc, least_to_travel))
        return float(acc[held_back - 1]) if held_back else 0.0


class Above(Part, frozen=True):
    """Send entries above the bound δᵗ (Parameter Flow's value-bounded filter, DVF).

    Args:
        delta: δ, or the share of entries to ``Drop``.
        decay: How δᵗ changes: "rate" δ·lrₜ/lr₀, "root" δ/√t (the paper's), "constant" δ.
        congested: Replaces ``delta`` on a congested link (the paper's δ_up).
        congested_below: A link with less available bandwidth, in bytes per second, is congested.
        of_mean: Divide δ by √n: the mean of n workers' updates is that much smaller.

    Raises:
        ConfigError: A bound is negative or not finite, or ``decay`` is unknown.

    >>> Above(0.5, decay="constant")
    Above(delta=0.5, decay='constant', congested=None, congested_below=None, of_mean=False)

    References:
        Future Network Theory Lab, Huawei Research: Improving Network Performance for Distributed
        Machine Learning in Commodity Clusters with Parameter Flow.
    """

    delta: float | Drop = Drop(0.85)
    decay: Decay = "rate"
    congested: float | Drop | None = None
    congested_below: float | None = None
    of_mean: bool = False

    def __post_init__(self) -> None:
        _check_bound("delta", self.delta)
        if self.congested is not None:
            _check_bound("congested", self.congested)
        if self.decay not in get_args(Decay):
            raise ConfigError(f"decay={self.decay!r}: choose one of {', '.join(get_args(Decay))}")

    def facts(self) -> Facts:
        return facts()

    def wire_bytes(self, numel: int, workers: int, packed: Packed) -> float:
        """Return the bytes of so many values: of those not dropped, or of all if values decide."""
        return packed(numel, self.entries(numel))

    def entries(self, numel: int) -> int:
        """Return the most entries of ``numel`` that are sent on a link that is not congested."""
        return numel - int(self.delta.ratio * numel) if isinstance(self.delta, Drop) else numel

    def bound(self, values: Values, memory: Floats, ctx: EncodeContext) -> Bound:
        """Return δᵗ as a bound: entries above it are sent."""
        return Bound(self.threshold(values, memory, ctx))

    def threshold(self, values: Values, memory: Floats, ctx: EncodeContext) -> float:
        """Return δᵗ; a bound from a share to drop does not decay, since its share is constant."""
        wanted = self.congested if ctx.congested and self.congested is not None else self.delta
        if isinstance(wanted, Drop):
            return wanted.bound(values, memory, ctx.clock)
        if self.of_mean:
            wanted /= math.sqrt(ctx.workers)
        if self.decay == "rate":
            return wanted * ctx.rate
        return wanted / math.sqrt(ctx.clock) if self.decay == "root" else wanted


class TopK(Part, frozen=True):
    """Send the largest magnitudes: k = ⌈share · n⌉ of the n entries of a piece of a tensor.

    Of equal entries the first are sent. Zeros are not sent. An entry that is not finite counts as
    larger than any other and is always sent.

    Args:
        share: Above 0, at most 1.

    Raises:
        ConfigError: The share is out of range.

    >>> four = Values(np.float32([1, -4, 2, 4]).view(np.uint8), "float32")
    >>> TopK(0.25).bound(four, np.zeros(4, np.float32), EncodeContext())
    Bound(above=4.0, ties=1)

    References:
        Aji and Heafield: Sparse Communication for Distributed Gradient Descent (2017).
        Lin, Han, Mao, Wang and Dally: Deep Gradient Compression: Reducing the Communication
        Bandwidth for Distributed Training (2018).
    """

    share: float

    def __post_init__(self) -> None:
        is_number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        if not (is_number and 0 < self.share <= 1):
            raise ConfigError(
                f"TopK(share={self.share!r}): give the share of entries to send, above 0 and "
                "at most 1, such as 0.01"
            )

    def facts(self) -> Facts:
        return facts()

    def wire_bytes(self, numel: int, workers: int, packed: Packed) -> float:
        """Return the bytes of the k largest of so many values."""
        return packed(numel, math.ceil(self.share * numel))

    def bound(self, values: Values, memory: Floats, ctx: EncodeContext) -> Bound:
        """Return the k-th largest magnitude of values plus memory, and how many entries equal to it
        are among the k."""
        if not values.numel:
            return Bound(0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            acc = np.abs(values.data.view(np.float32) + memory)
        k = math.ceil(self.share * acc.size)
        least = kth_largest(k, acc)
        if not math.isfinite(least):
            return Bound(float(np.finfo(np.float32).max))
        if least == 0:
            return Bound(0.0)
        return Bound(least, k - int(np.count_nonzero(~(acc <= least))))


def kth_largest(k: int, magnitudes: Floats) -> float:
    """Return the k-th largest; NaN counts as larger than all."""
    # Sort only the entries above a guess: a sample's value that about 1.5 k of all entries exceed.
    sample = magnitudes[:: max(1, magnitudes.size // SAMPLES) | 1]
    wanted = min(sample.size, 16 + int(1.5 * k * sample.size / magnitudes.size))
    guess = np.partition(sample, sample.size - wanted)[sample.size - wanted]
    candidates = magnitudes[~(magnitudes < guess)]
    among = candidates if candidates.size >= k else magnitudes
    return float(np.partition(among, among.size - k)[among.size - k])


# Every selector that a filter may name.
AnySelector = Above | TopK
