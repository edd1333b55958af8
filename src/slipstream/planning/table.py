"""A plan as a table: every tensor's route, its bytes, its time, and the reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.planning.choosing import Verdict, Ways
from slipstream.planning.costs import LayerShape, Speeds
from slipstream.printable import printable
from slipstream.types import Spec
from slipstream.units import human_bytes


@dataclass(frozen=True, slots=True)
class Row:
    """One layer for which there was a choice, or one tensor."""

    name: str
    shape: tuple[int, ...]
    scheme: str
    link_bytes: float  # over a worker's busiest link, each way
    seconds: float | None
    dense_link_bytes: float
    dense_seconds: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums of the rows, and the time that the computation would have to hide."""

    link_bytes: float
    dense_link_bytes: float
    seconds: float | None
    dense_seconds: float | None

    @property
    def speedup(self) -> float | None:
        """Speed-up of the exchange alone, against all dense."""
        if not self.seconds or self.dense_seconds is None:
            return None
        return self.dense_seconds / self.seconds


def tabulate(
    specs: Sequence[Spec],
    schemes: Sequence[str],
    ways: Sequence[Ways],
    verdicts: Mapping[str, Verdict],
    shapes: Mapping[str, LayerShape],
    speeds: Speeds | None,
) -> list[Row]:
    """``schemes[i]`` and ``ways[i]`` are those of tensor i on its dense route."""
    rows: list[Row] = []
    done: set[str] = set()
    for spec, scheme, way in zip(specs, schemes, ways, strict=True):
        if spec.layer and spec.layer in verdicts:
            if spec.layer not in done:
                done.add(spec.layer)
                rows.append(
                    _layer_row(shapes[spec.layer], scheme, way, verdicts[spec.layer], speeds)
                )
            continue
        moved = way.dense_bytes(spec.nbytes)
        seconds = None if speeds is None else way.dense_seconds(spec.nbytes, speeds)
        why = spec.obstacle or ("a buffer" if spec.role == "buffer" else "no compact form")
        rows.append(Row(spec.name, spec.shape, scheme, moved, seconds, moved, seconds, why))
    return rows


def _layer_row(
    shape: LayerShape, scheme: str, way: Ways, verdict: Verdict, speeds: Speeds | None
) -> Row:
    dense = way.dense_bytes(shape.dense_bytes)
    dense_s = None if speeds is None else way.dense_seconds(shape.dense_bytes, speeds)
    return Row(
        shape.name,
        (shape.outputs, shape.inputs),
        f"{shape.form}/{verdict.place}" if verdict.compact else scheme,
        verdict.link_bytes if verdict.compact else dense,
        verdict.seconds if verdict.compact else dense_s,
        dense,
        dense_s,
        verdict.why,
    )


def total(rows: Sequence[Row]) -> Totals:
    known = [row for row in rows if row.seconds is not None and row.dense_seconds is not None]
    timed = bool(rows) and len(known) == len(rows)
    return Totals(
        sum(row.link_bytes for row in rows),
        sum(row.dense_link_bytes for row in rows),
        sum(row.seconds or 0.0 for row in rows) if timed else None,
        sum(row.dense_seconds or 0.0 for row in rows) if timed else None,
    )


def as_text(rows: Sequence[Row]) -> str:
    """Columns for a terminal, and their totals."""
    heads = ("layer", "shape", "scheme", "each way", "ms", "why")
    cells = [heads, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    lines = []
    for line in cells:
        padded = [
            text.rjust(width) if head in ("each way", "ms") else text.ljust(width)
            for text, width, head in zip(line, widths, heads, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join([*lines, "", _sums(total(rows))])


def _cells(row: Row) -> tuple[str, ...]:
    shape, name = " x ".join(str(size) for size in row.shape), printable(row.name)
    moved = human_bytes(row.link_bytes)
    return (name, shape, row.scheme, moved, _ms(row.seconds), row.why)


def _sums(sums: Totals) -> str:
    said = (
        f"a step moves {human_bytes(sums.link_bytes)} over a worker's link each way; "
        f"all dense: {human_bytes(sums.dense_link_bytes)}"
    )
    if sums.seconds is not None and sums.dense_seconds is not None and sums.speedup is not None:
        said += (
            f"\nexchange predicted at {_ms(sums.seconds)} ms; all dense: "
            f"{_ms(sums.dense_seconds)} ms ({sums.speedup:.1f} times as long)"
        )
    return said


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.4g}"


def as_tables(tables: Sequence[str]) -> str:
    """Several pairs' tables, each under the number of its pair; one table is unchanged."""
    if len(tables) == 1:
        return tables[0]
    return "\n\n".join(f"pair {number}\n{table}" for number, table in enumerate(tables))
