"""Events of peers in partial exchange: they die, come back, or ask to be admitted."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.types import Rank


@dataclass(frozen=True, slots=True)
class Gone:
    """The event that a peer has died."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Back:
    """The event that a peer has come back; it counts as having made ``drains`` drains."""

    rank: Rank
    drains: int


@dataclass(frozen=True, slots=True)
class Applicant:
    """A restarted worker that asks to be admitted, and its new address."""

    rank: Rank
    address: str
    incarnation: int
    process: int = 0
