"""Dense or compact, layer by layer: the chooser that Poseidon calls BestScheme. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from slipstream.planning.costs import (
    LayerShape,
    Speeds,
    compact_seconds,
    dense_link_bytes,
    dense_seconds,
    ps_both,
    sfb,
)

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Ways:
    """How dense tensors travel here: by how many workers and servers (none: collectives, or what
    part of a tensor every worker sends to each other one)."""

    workers: int
    servers: int = 0
    dedicated: bool = False
    to_each: float = 0.0

    def dense_bytes(self, nbytes: float) -> float:
        """The busiest link's, each way, for a dense tensor of this size."""
        if self.to_each:
            return (self.workers - 1) * self.to_each * nbytes
        return dense_link_bytes(nbytes, self.workers, self.servers, dedicated=self.dedicated)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was chosen for a layer, what it moves over a worker's link each way, and why."""

    compact: bool
    link_bytes: float
    seconds: float | None
    why: str
    place: str = "mesh"  # where a compact gradient goes


class Chooser(Protocol):
    """A frozen rule that every worker applies alike."""

    def choose(
        self, shape: LayerShape, rows: int, ways: Ways, *, item_bytes: int | None
    ) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class ByBytes:
    """The paper's Algorithm 1: whichever moves fewer floats through a node."""

    needs_speeds: ClassVar[bool] = False

    def choose(
        self, shape: LayerShape, rows: int, ways: Ways, *, item_bytes: int | None
    ) -> Verdict:
        m, n, p1 = shape.outputs, shape.inputs, ways.workers
        dense = ps_both(m, n, p1, ways.servers or p1)
        if shape.form == "factors":
            compact = float(sfb(m, n, rows, p1))
        else:
            compact = 2 * (p1 - 1) * shape.compact_bytes(rows) / shape.item_bytes
        said = f"{compact / 1e6:.3g}M floats against {dense / 1e6:.3g}M dense"
        return _verdict(shape, rows, ways, item_bytes, compact <= dense, None, said)


@dataclass(frozen=True, slots=True)
class Always:
    """Factors for every fully connected layer, up to its server; the matrix comes back."""

    def choose(
        self, shape: LayerShape, rows: int, ways: Ways, *, item_bytes: int | None
    ) -> Verdict:
        if shape.form != "factors" or shape.item_bytes != FP32_BYTES:
            moved = ways.dense_bytes(shape.dense_bytes)
            return Verdict(False, moved, None, "not a fully connected layer in fp32")
        moved = shape.compact_bytes(rows, item_bytes) + shape.dense_bytes
        return Verdict(True, moved, None, "factors up, the matrix down", "sharded")


@dataclass(frozen=True, slots=True)
class ByTime:
    """Whichever is predicted to take less time at measured speeds."""

    speeds: Speeds

    def choose(
        self, shape: LayerShape, rows: int, ways: Ways, *, item_bytes: int | None
    ) -> Verdict:
        dense = dense_seconds(
            shape.dense_bytes, ways.workers, ways.servers, self.speeds, dedicated=ways.dedicated
        )
        compact = compact_seconds(shape, rows, ways.workers, self.speeds, item_bytes)
        said = f"{1000 * compact:.3g} ms against {1000 * dense:.3g} ms dense"
        taken = compact < dense
        seconds = compact if taken else dense
        return _verdict(shape, rows, ways, item_bytes, taken, seconds, said)


def _verdict(
    shape: LayerShape,
    rows: int,
    ways: Ways,
    item_bytes: int | None,
    compact: bool,
    seconds: float | None,
    said: str,
) -> Verdict:
    if not rows:
        dense = ways.dense_bytes(shape.dense_bytes)
        return Verdict(False, dense, seconds, "its forward gave no rows")
    if compact:
        moved = (ways.workers - 1) * shape.compact_bytes(rows, item_bytes)
    else:
        moved = ways.dense_bytes(shape.dense_bytes)
    return Verdict(compact, moved, seconds, said)
