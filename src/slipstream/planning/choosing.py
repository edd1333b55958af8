"""Dense or compact, layer by layer: the rule that Poseidon calls BestScheme. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from slipstream.errors import ConfigError
from slipstream.parts import Part
from slipstream.planning.costs import (
    LayerShape,
    Speeds,
    compact_seconds,
    dense_link_bytes,
    ps_both,
)


@dataclass(frozen=True, slots=True)
class Ways:
    """The cost of a dense tensor's route. Bytes and times are those of a step, on average.

    Attributes:
        workers: The number of workers.
        servers: The number of servers; 0: a ring, or what ``to_each`` says.
        dedicated: True if servers have hosts of their own.
        to_each: The part of a tensor that every worker sends to each other worker; 0: none.
        density: The part of a tensor's own bytes that its codecs send.
        every: The steps from one exchange to the next.

    >>> Ways(workers=2, density=0.25, every=10).plain.dense_bytes(1000)
    1000.0
    >>> Ways(workers=2, density=0.25, every=10).dense_bytes(1000)
    25.0
    """

    workers: int
    servers: int = 0
    dedicated: bool = False
    to_each: float = 0.0
    density: float = 1.0
    every: int = 1

    @property
    def plain(self) -> Ways:
        """The same route for every value, in every step."""
        return replace(self, density=1.0, every=1)

    def dense_bytes(self, nbytes: float) -> float:
        """Return the busiest link's bytes, each way, for a dense tensor of this size."""
        nbytes *= self.density / self.every
        if self.to_each:
            return (self.workers - 1) * self.to_each * nbytes
        return dense_link_bytes(nbytes, self.workers, self.servers, dedicated=self.dedicated)

    def dense_seconds(self, nbytes: float, speeds: Speeds) -> float:
        """Return the time of the busiest link, plus a server's time for summing."""
        link_s = 8 * self.dense_bytes(nbytes) / speeds.link_bits_per_s
        summed_bytes = self.workers * nbytes / self.servers / self.every if self.servers else 0.0
        return link_s + summed_bytes / speeds.server_bytes_per_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """The choice for a layer, its bytes over a worker's link each way, and the reason."""

    compact: bool
    link_bytes: float
    seconds: float | None
    why: str
    place: str = "mesh"  # the topology of a compact gradient


class Chooser(Protocol):
    """A frozen rule that gives the same result on every worker."""

    def choose(
        self, shape: LayerShape, rows: int, ways: Ways, *, compact_bytes: float | None = None
    ) -> Verdict:
        """Choose a layer's form.

        Args:
            shape: The layer.
            rows: The rows that a worker's batch gives it.
            ways: The cost of its dense route.
            compact_bytes: The bytes of these rows in its codec; None: rows in their own precision.
        """
        ...


class ByBytes(Part, frozen=True):
    """Choose the form that moves fewer floats through a node (the Poseidon paper's Algorithm 1).

    Values that are sent in fewer bits count as that part of a float.

    >>> fc = LayerShape("fc", "factors", outputs=4096, inputs=4096)
    >>> ByBytes().choose(fc, rows=32, ways=Ways(workers=8)).compact
    True
    """

    @property
    def needs_speeds(self) -> bool:
        return False

    def measured(self, speeds: Speeds | None) -> ByBytes:
        return self

    def choose(
        self, shape: LayerShape, rows: int, ways: Ways, *, compact_bytes: float | None = None
    ) -> Verdict:
        m, n, p1 = shape.outputs, shape.inputs, ways.workers
        dense = ways.density * ps_both(m, n, p1, ways.servers or p1)
        if compact_bytes is None:
            compact_bytes = shape.compact_bytes(rows)
        # For factors in their own precision, this is the paper's SFB, 2 K (P1 - 1) (M + N).
        compact = 2 * (p1 - 1) * compact_bytes / shape.item_bytes
        reason = f"{compact / 1e6:.3g}M floats against {dense / 1e6:.3g}M dense"
        return _verdict(shape, rows, ways, compact_bytes, compact <= dense, None, reason)


class ByTime(Part, frozen=True):
    """Choose the form with the shorter predicted time.

    Args:
        speeds: The speeds of links, GEMM and servers; None: measured when a job starts.

    >>> ByTime().needs_speeds
    True
    """

    speeds: Speeds | None = None

    @property
    def needs_speeds(self) -> bool:
        return self.speeds is None

    def measured(self, speeds: Speeds | None) -> ByTime:
        """Return the same rule with speeds, unless it already has them."""
        return self if self.speeds is not None else msgspec.structs.replace(self, speeds=speeds)

    def choose(
        self, shape: LayerShape, rows: int, ways: Ways, *, compact_bytes: float | None = None
    ) -> Verdict:
        if self.speeds is None:
            raise ConfigError("choosing by time needs speeds: measure them, or give them")
        if compact_bytes is None:
            compact_bytes = shape.compact_bytes(rows)
        dense = ways.dense_seconds(shape.dense_bytes, self.speeds)
        compact = compact_seconds(shape, rows, ways.workers, self.speeds, compact_bytes)
        reason = f"{1000 * compact:.3g} ms against {1000 * dense:.3g} ms dense"
        is_compact = compact < dense
        seconds = compact if is_compact else dense
        return _verdict(shape, rows, ways, compact_bytes, is_compact, seconds, reason)


# Every chooser that a policy may name.
AnyChooser = ByTime | ByBytes


def _verdict(
    shape: LayerShape,
    rows: int,
    ways: Ways,
    compact_bytes: float,
    compact: bool,
    seconds: float | None,
    reason: str,
) -> Verdict:
    if not rows:
        dense = ways.dense_bytes(shape.dense_bytes)
        return Verdict(False, dense, seconds, "its forward gave no rows")
    sent = (ways.workers - 1) * compact_bytes if compact else ways.dense_bytes(shape.dense_bytes)
    return Verdict(compact, sent, seconds, reason)
