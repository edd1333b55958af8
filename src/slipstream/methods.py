"""Methods: how workers get each other's updates. Every strategy has one.

``Rounds`` is composed of routes, consistency, update and schedule. ``PartialExchange`` and
``SharedMemoryUpdates`` do not use these parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Self

import msgspec

from slipstream.codecs import Above, Filter
from slipstream.consistency import Asynchronous, Consistency, StaleSynchronous
from slipstream.errors import ConfigError
from slipstream.parts import Part
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.routes import AnyPolicy, Everywhere, Route
from slipstream.schedules import AfterBackward, AnySchedule, WaitFree
from slipstream.topologies import Mesh, Sharded
from slipstream.types import ITEM_BYTES, LARGEST_CHUNK_BYTES, Rank, Spec
from slipstream.updates import Add, Update, UserOptimizer, UserSteps

STEPS_PER_WORKER = 4
Growth = Literal["none", "sqrt", "linear"]
# The power of n with which the sum of n workers' updates grows.
GROWTHS: dict[Growth, float] = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


class Rounds(Part, frozen=True):
    """Exchange contributions in rounds; the result of a round is applied once.

    Args:
        routes: The policy that gives each tensor its route.
        consistency: Which contributions count, and when a worker may continue.
        update: What is sent, and who applies it.
        schedule: When a gradient is sent.
        chunk_bytes: The largest part of a tensor that is sent as one message.

    Raises:
        ConfigError: ``chunk_bytes`` is not a number of bytes that a message may have.
    """

    routes: AnyPolicy
    consistency: Consistency = Consistency()
    update: Update = Update()
    schedule: AnySchedule = WaitFree()
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        size = self.chunk_bytes  # its type is checked with those of all other fields
        if type(size) is int and not 1 <= size <= LARGEST_CHUNK_BYTES:
            raise ConfigError(
                f"chunk_bytes={size}: give a number of bytes, 1 or more, at most "
                f"{LARGEST_CHUNK_BYTES}"
            )

    def as_rounds(self) -> Rounds:
        """Return these rounds."""
        return self


class PartialExchange(Part, frozen=True):
    """Send every peer one of p partitions of a worker's updates at a time, in rotation.

    A worker applies its own update at once, scaled by c, and those of its peers as they arrive.
    Updates accumulate for a peer until their partition is sent. A worker begins step s only when
    s < min over its peers of their last known step + p + τ.

    Args:
        partitions: p. None: as many as the links need, recomputed as they change.
        staleness: τ, for uneven networks and step times. None: four steps for each worker.
        bytes_s: The rate of a worker's link. None: it is measured.
        held_back: Also hold back the small entries of a partition.
        same_for_all: All peers get the same partition at a time: one accumulator is enough instead
            of min(p, n − 1).
        growth: "none": n workers move as far as the mean of their updates, c = 1/n. "sqrt" or
            "linear" make c √n or n times as large.
        warm_steps: The number of steps in which c grows, linearly, from 1/n to that.

    Raises:
        ConfigError: A value is invalid.

    >>> PartialExchange(staleness=2).may_begin(step=4, known={1: 0, 2: 9}, partitions=2)
    False
    """

    partitions: int | None = None
    staleness: int | None = None
    bytes_s: float | None = None
    held_back: Above | None = None
    same_for_all: bool = False
    growth: Growth = "none"
    warm_steps: int = 0

    def __post_init__(self) -> None:
        p = self.partitions
        if p is not None and (type(p) is not int or p < 1):
            raise ConfigError(f"partitions={p!r}: give a number, 1 or more, or leave it out")
        if self.staleness is not None and (type(self.staleness) is not int or self.staleness < 0):
            raise ConfigError(
                f"a staleness of {self.staleness!r}: give a number of steps, 0 or more"
            )
        if self.bytes_s is not None and not 0 < self.bytes_s < math.inf:
            raise ConfigError(f"bytes_s={self.bytes_s!r}: give bytes a second, above 0")
        if self.growth not in GROWTHS:
            raise ConfigError(f"growth={self.growth!r}: choose one of {', '.join(GROWTHS)}")
        if type(self.warm_steps) is not int or self.warm_steps < 0:
            raise ConfigError(f"warm_steps={self.warm_steps!r}: give a number of steps, 0 or more")

    def among(self, workers: int) -> Self:
        """Return the same method with values that depend on the number of workers filled in."""
        if self.staleness is not None:
            return self
        return msgspec.structs.replace(self, staleness=STEPS_PER_WORKER * workers)

    def may_begin(self, step: int, known: Mapping[Rank, int], partitions: int) -> bool:
        """Return whether step ``step`` may begin; ``known``: the steps of each live peer."""
        return not known or step < min(known.values()) + self._reach(partitions)

    def clock(self, updates: int, beat: int, partitions: int) -> int:
        """Return how many steps a peer has certainly made, from its updates and its heartbeats.

        The training thread sends updates and may be busy elsewhere; heartbeats have their own
        thread. At most p + τ steps may be in flight, so an update is at most 2(p + τ) steps old.
        """
        return max(updates, min(beat, updates + self._reach(partitions)))

    def _reach(self, partitions: int) -> int:
        if self.staleness is None:
            raise ConfigError("PartialExchange: the number of workers is not known yet")
        return partitions + self.staleness

    def coefficient(self, step: int, workers: int) -> float:
        """Return c, the factor of one worker's update.

        Args:
            step: The number of steps that the worker has made before.
            workers: n.

        >>> grows = PartialExchange(growth="linear", warm_steps=10)
        >>> [grows.coefficient(step, workers=4) for step in (0, 5, 10)]
        [0.25, 0.625, 1.0]
        """
        full = workers ** GROWTHS[self.growth]
        warmth = min(1.0, step / self.warm_steps) if self.warm_steps else 1.0
        return float((1.0 + (full - 1.0) * warmth) / workers)

    def wire_bytes(self, spec: Spec, workers: int) -> float:
        """Return the bytes of a tensor that a worker sends each peer in a step.

        If p follows from the links, as many partitions as peers are assumed.
        """
        partitions = self.partitions or max(1, workers - 1)
        if self.held_back is None:
            return ITEM_BYTES["float32"] * spec.numel / partitions
        due = Spec(spec.name, (math.ceil(spec.numel / partitions),), "float32", spec.order)
        return Filter(self.held_back).wire_bytes(due, workers)

    def as_rounds(self) -> Rounds:
        """Return rounds with the properties of partial exchange; they are never made."""
        return Rounds(
            Everywhere(Route(Mesh(), up=Filter(Above(0.0, decay="constant")))),
            Consistency(StaleSynchronous(without_lost=True)),
            Update(UserSteps(), Add()),
            AfterBackward(),
        )


class SharedMemoryUpdates(Part, frozen=True):
    """Train workers of one machine on weights in shared memory; each gradient is an update.

    Args:
        slots: The most gradients of a worker that are written and not yet applied, 1 to 64.
        consistent: True if a worker computes on a consistent copy of the weights.
        apply: Who updates weights: a "server" process, or every worker by itself ("direct").
        checkpoints: A directory for checkpoints; None: one that is removed with the job.
        every_s: Seconds between checkpoints.

    Raises:
        ConfigError: A value is out of range.

    >>> SharedMemoryUpdates(slots=4).slots
    4
    """

    slots: int = 2
    consistent: bool = False
    apply: Literal["server", "direct"] = "server"
    checkpoints: str | None = None
    every_s: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.consistent, bool):
            raise ConfigError(f"consistent={self.consistent!r}: choose True or False")
        if self.apply not in ("server", "direct"):
            raise ConfigError(f"apply={self.apply!r}: choose 'server' or 'direct'")
        if type(self.slots) is not int or not 1 <= self.slots <= 64:
            raise ConfigError(f"slots={self.slots!r}: choose a whole number from 1 to 64")
        if self.checkpoints is not None and not (
            isinstance(self.checkpoints, str) and self.checkpoints
        ):
            raise ConfigError(f"checkpoints={self.checkpoints!r}: give the path of a directory")
        if not isinstance(self.every_s, int | float) or not 0 < self.every_s < math.inf:
            raise ConfigError(f"every_s={self.every_s!r}: give seconds, more than 0")

    def as_rounds(self) -> Rounds:
        """Return rounds with the properties of shared memory; they are never made."""
        return Rounds(
            Everywhere(Route(Sharded())),
            Consistency(Asynchronous()),
            Update(outer=UserOptimizer(at="server" if self.apply == "server" else "worker")),
            AfterBackward(),
        )


# Every method that a strategy may name.
AnyMethod = Rounds | PartialExchange | SharedMemoryUpdates
