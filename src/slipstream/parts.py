"""The root of all parts of a strategy: frozen values that print, compare and travel as JSON."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

# What a part says about itself; ``slipstream.compat`` has the rules over sets of these.
Fact = Literal[
    # Topologies: who holds a tensor.
    "servers hold",
    "every worker holds",
    "one process holds",
    "workers relay",
    "hosts aggregate first",
    "some tensors skip the host",
    "layers stay whole",
    # Transports.
    "over links",
    "over a collective",
    "in shared memory",
    # Codecs, on the way up and on the way down. Error feedback: what is not sent is kept, and
    # added to the next gradient. Partial exchange: partitions of updates, in turns (Ako).
    "up: dense",
    "up: compact form",
    "up: lossy",
    "up: error feedback",
    "up: shorter values",
    "up: partial exchange",
    "down: lossy",
    "down: error feedback",
    "down: partial exchange",
    "down: nothing is sent",
    # Consistency.
    "rounds of all workers",
    "rounds of the first N",
    "stale-synchronous rounds",
    "each gradient is an update",
    "survives lost workers",
    "ramps up",
    "may run ahead",
    "bounded lead over peers",
    "waits for nobody",
    "damped",
    "damped by age",
    # Updates.
    "gradients are sent",
    "update deltas are sent",
    "keeps its own update",
    "workers update",
    "the holder updates",
    "adds the result",
    "the optimizer applies the result",
    "deltas grow with workers",
    "clips",
    "averages",
    # Schedules.
    "leaves during backward",
    "leaves when the link is free",
    # Policies.
    "chosen for each step",
    "several routes",
]
FACTS: frozenset[Fact] = frozenset(get_args(Fact))
Facts = frozenset[Fact]
NO_FACTS: Facts = frozenset()


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="part", tag=True):
    """A frozen recipe. Whatever a part remembers while it is used is kept by whoever uses it."""

    def facts(self) -> Facts:
        """What rules about combinations need to know of this part."""
        return NO_FACTS


def lists_to_tuples(part: Part) -> None:
    """Make lists in a part's fields tuples, so that it has a hash. For ``__post_init__``."""
    for name in part.__struct_fields__:
        if isinstance(value := getattr(part, name), list):
            msgspec.structs.force_setattr(part, name, tuple(value))


def facts(*given: Fact) -> Facts:
    """A set of facts; a type checker refuses unknown ones."""
    return frozenset(given)
