"""Units of rates and sizes, as users write them."""

from __future__ import annotations

import re

from slipstream.errors import ConfigError
from slipstream.printable import shown

# No link is faster, and numbers computed from a higher rate would overflow.
LEAST_BITS_S, MOST_BITS_S = 1e-3, 1e15

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits_per_second(rate: str | float) -> float:
    """``"200mbit"`` → 2e8; a number is taken as bits per second."""
    if isinstance(rate, str):
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg]?bit)", rate.strip().lower())
        if match is None:
            raise ConfigError(f"a rate of {shown(rate)} is not understood; write 200mbit or 1gbit")
        rate = float(match[1]) * _UNITS[match[2]]
    if not rate > 0:
        raise ConfigError(f"a rate of {shown(rate)} moves nothing; give one above 0")
    if not LEAST_BITS_S <= rate <= MOST_BITS_S:
        raise ConfigError(
            f"a rate of {shown(rate)} bit/s is no link's; give one from {LEAST_BITS_S:g} to "
            f"{MOST_BITS_S:g}"
        )
    return float(rate)


def human_bytes(nbytes: float) -> str:
    """``1.5 MiB``; bytes below 1 KiB are whole."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
