"""The place where results are applied: at every worker, or at the member that holds the tensor."""

from __future__ import annotations

from typing import Literal

from slipstream.errors import ConfigError
from slipstream.parts import Facts, facts

At = Literal["worker", "server"]


def facts_of(at: At) -> Facts:
    """Return facts for the compatibility rules."""
    return facts("workers update") if at == "worker" else facts("the holder updates")


def check_place(at: object) -> None:
    """Check the place of an update.

    Raises:
        ConfigError: ``at`` is neither "worker" nor "server".
    """
    if at not in ("worker", "server"):
        raise ConfigError(f"at={at!r}: choose 'worker' or 'server'")
