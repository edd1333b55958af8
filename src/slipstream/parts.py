"""The base of all parts of a strategy: frozen values that print, compare and convert to JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

# The facts that parts state about themselves; ``slipstream.compat`` has rules over sets of these.
Fact = Literal[
    # Topologies: who holds a tensor.
    "servers hold",
    "every worker holds",
    "workers hold shares",
    "workers relay",
    "hosts aggregate first",
    "some tensors skip the host",
    "layers stay whole",
    # Transports.
    "over links",
    "over a collective",
    # Codecs, of contributions (up) and of results (down). Error feedback: what is not sent is kept,
    # and added to the next gradient.
    # Agreed basis: frames can be decoded only with what all members learned in earlier rounds.
    # Each value rounded: every value is sent every time, and only its rounding error is kept.
    # No mean: a round's result is something else, such as the sign that most workers sent.
    "up: dense",
    "up: compact form",
    "up: lossy",
    "up: error feedback",
    "up: shorter values",
    "up: agreed basis",
    "up: each value rounded",
    "up: no mean",
    "down: lossy",
    "down: error feedback",
    "down: agreed basis",
    "down: each value rounded",
    "down: as up",
    # Consistency.
    "rounds of all workers",
    "rounds of the first N",
    "stale-synchronous rounds",
    "each gradient is an update",
    "every K gradients are an update",
    "survives lost workers",
    "ramps up",
    "may run ahead",
    "damped",
    "damped by age",
    # Updates.
    "gradients are sent",
    "update deltas are sent",
    "outer gradients are sent",
    "in fragments",
    "merged later",
    "keeps own weights in part",
    "workers update",
    "the holder updates",
    "adds the result",
    "the optimizer applies the result",
    "an outer optimizer applies the result",
    "clips",
    "averages",
    # Schedules.
    "leaves during backward",
    # Policies.
    "chosen in the run",
    "several routes",
]
FACTS: frozenset[Fact] = frozenset(get_args(Fact))
Facts = frozenset[Fact]
NO_FACTS: Facts = frozenset()


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="part", tag=True):
    """A frozen recipe. State that a part needs is kept by its user, outside the part."""

    def facts(self) -> Facts:
        """Return facts for the compatibility rules."""
        return NO_FACTS


def lists_to_tuples(part: Part) -> None:
    """Convert lists in a part's fields to tuples, so that it is hashable. For ``__post_init__``."""
    for name in part.__struct_fields__:
        if isinstance(value := getattr(part, name), list):
            msgspec.structs.force_setattr(part, name, tuple(value))


def facts(*given: Fact) -> Facts:
    """Return a set of facts; a type checker refuses unknown ones."""
    return frozenset(given)


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """An incompatible combination: the reason, and what to do instead.

    A strategy breaks it if all facts of ``when`` hold, at least one of ``any_of`` (unless that is
    empty), and none of ``unless``.
    """

    when: Facts
    why: str
    instead: str
    any_of: Facts = NO_FACTS
    unless: Facts = NO_FACTS

    def broken_by(self, known: Facts) -> bool:
        chosen = not self.any_of or self.any_of & known
        return self.when <= known and bool(chosen) and not self.unless & known
