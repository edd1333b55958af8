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
    """One layer for which there was a choice, or one tensor; bytes and seconds are of a step."""

    name: str
    shape: tuple[int, ...]
    scheme: str
    link_bytes: float  # over a worker's busiest link, each way
    seconds: float | None
    dense_link_bytes: float
    dense_seconds: float | None
    why: str
    every: int = 1  # steps from one exchange to the next, over which the bytes are spread


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums of the rows, and the time that the computation would have to hide."""

    link_bytes: float
    dense_link_bytes: float
    seconds: float | None
    dense_seconds: float | None

    @property
    def speedup(self) -> float | None:
        """The speed-up of the exchange alone, against all dense."""
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
    """Return rows for layers and tensors; ``schemes[i]``, ``ways[i]`` are tensor i's, dense."""
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
        rows.append(_tensor_row(spec, scheme, way, speeds))
    return rows


def _tensor_row(spec: Spec, scheme: str, way: Ways, speeds: Speeds | None) -> Row:
    costs, dense = (_cost(each, spec.nbytes, speeds) for each in (way, way.plain))
    why = spec.obstacle or ("a buffer" if spec.role == "buffer" else "no compact form")
    return Row(spec.name, spec.shape, scheme, *costs, *dense, why, way.every)


def _layer_row(
    shape: LayerShape, scheme: str, way: Ways, verdict: Verdict, speeds: Speeds | None
) -> Row:
    costs, dense = (_cost(each, shape.dense_bytes, speeds) for each in (way, way.plain))
    if verdict.compact:
        scheme, costs = f"{shape.form}/{verdict.place}", (verdict.link_bytes, verdict.seconds)
    return Row(shape.name, (shape.outputs, shape.inputs), scheme, *costs, *dense, verdict.why)


def _cost(way: Ways, nbytes: float, speeds: Speeds | None) -> tuple[float, float | None]:
    """Return the bytes and the time of a tensor's dense route."""
    seconds = None if speeds is None else way.dense_seconds(nbytes, speeds)
    return way.dense_bytes(nbytes), seconds


def total(rows: Sequence[Row]) -> Totals:
    known = [row for row in rows if row.seconds is not None and row.dense_seconds is not None]
    timed = bool(rows) and len(known) == len(rows)
    return Totals(
        sum(row.link_bytes for row in rows),
        sum(row.dense_link_bytes for row in rows),
        sum(row.seconds or 0.0 for row in rows) if timed else None,
        sum(row.dense_seconds or 0.0 for row in rows) if timed else None,
    )


def as_text(rows: Sequence[Row], link: str = "a worker's link") -> str:
    """Format rows as columns for a terminal, with totals; ``link`` names the link in the totals."""
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
    return "\n".join([*lines, "", _sums(total(rows), link) + _spread(rows)])


def _cells(row: Row) -> tuple[str, ...]:
    shape, name = " x ".join(str(size) for size in row.shape), printable(row.name)
    nbytes = human_bytes(row.link_bytes)
    return (name, shape, row.scheme, nbytes, _ms(row.seconds), row.why)


def _sums(sums: Totals, link: str) -> str:
    text = (
        f"a step moves {human_bytes(sums.link_bytes)} over {link} each way; "
        f"all dense: {human_bytes(sums.dense_link_bytes)}"
    )
    if sums.seconds is not None and sums.dense_seconds is not None and sums.speedup is not None:
        text += (
            f"\nexchange predicted at {_ms(sums.seconds)} ms; all dense: "
            f"{_ms(sums.dense_seconds)} ms ({sums.speedup:.1f} times as long)"
        )
    return text


def _spread(rows: Sequence[Row]) -> str:
    """Return a line on the size of one exchange, if tensors are not exchanged in every step."""
    every = max((row.every for row in rows), default=1)
    if every == 1:
        return ""
    whole = human_bytes(sum(row.link_bytes * row.every for row in rows))
    return (
        f"\non average over {every} steps, in which each tensor is exchanged once: all take {whole}"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.4g}"


def as_tables(tables: Sequence[str]) -> str:
    """Join several pairs' tables, each under the number of its pair; one table is unchanged."""
    if len(tables) == 1:
        return tables[0]
    return "\n\n".join(f"pair {number}\n{table}" for number, table in enumerate(tables))
