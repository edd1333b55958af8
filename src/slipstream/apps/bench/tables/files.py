"""A user's own layer table, as CSV or JSON, with the times of one step.

    layer,shape,forward_ms,backward_ms          {"name": "mine", "batch": 32, "layers": [
    conv1,64x3x7x7;64,1.5,3.0                     {"layer": "conv1", "shape": [[64, 3, 7, 7], [64]],
    pool1,,0.2,0.2                                 "forward_ms": 1.5, "backward_ms": 3.0}, …]}
    fc,1000x2048;1000,0.4,0.8

The first shape is the weight's; a bias, or the scale and shift of a batch normalisation, follow.
``kind`` (conv, fc, embedding, other) may be given; else two dimensions are fc and more are conv.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from slipstream.apps.bench.reading import (
    columns_of,
    lines_of,
    parse_json,
    read_text,
    refused,
    rows_of,
)
from slipstream.apps.bench.tables.layers import KINDS, Kind, Layer, Shape, Table
from slipstream.errors import ConfigError
from slipstream.printable import shown

SUFFIXES = (".json", ".csv")
COLUMNS = ("layer", "shape", "forward_ms", "backward_ms")
DEFAULT_BATCH = 32
MOST_SHAPES = 3
MOST_DIMENSIONS = 8
MOST_LAYERS = 4096
MOST_PARAMETERS = 10**11  # of a table: a plan has a chunk per half million
MOST_BATCH = 10**9
MOST_MS = 1e9  # of a layer
MOST_LETTERS = 200  # of a name
MOST_BYTES = 4 << 20

Row = tuple[int | None, Mapping[str, Any]]  # its line number, and its content
_FORMAT = f"give each layer {', '.join(COLUMNS)}"


def read_table(path: Path, *, batch: int | None = None) -> Table:
    """Read the table in a file; its times are for ``batch`` rows, or for its own number."""
    text = read_text(path, "give a layer table as .csv or .json", MOST_BYTES)
    if path.suffix.lower() == ".json":
        name, own_batch, rows = _from_json(path, text)
    else:
        name, own_batch, rows = path.stem, None, _from_csv(path, text)
    layers = tuple(_layer(path, line, row) for line, row in islice(rows, MOST_LAYERS + 1))
    if not layers:
        raise refused(path, None, "no layers in it", _FORMAT)
    if len(layers) > MOST_LAYERS:
        raise refused(path, None, f"more than {MOST_LAYERS} layers", "merge equal ones")
    if sum(layer.parameters for layer in layers) > MOST_PARAMETERS:
        problem = f"more than {MOST_PARAMETERS:.0e} parameters"
        raise refused(path, None, problem, "give the layers of one worker's part of the net")
    if not sum(layer.forward_ms + layer.backward_ms for layer in layers) > 0:
        raise refused(path, None, "all times are 0", "give the milliseconds a step takes")
    _refuse_duplicates(path, layers)
    return Table(name, layers, own_batch or batch or DEFAULT_BATCH, f"read from {path}")


def _from_csv(path: Path, text: str) -> Iterator[Row]:
    reader = csv.DictReader(lines_of(text), skipinitialspace=True)
    missing = [column for column in COLUMNS if column not in columns_of(path, reader)]
    if missing:
        raise refused(path, 1, f"no column {', '.join(missing)}", f"begin with {','.join(COLUMNS)}")
    for row in rows_of(path, reader):
        if None in row or None in row.values():
            raise refused(
                path, reader.line_num, "not as many fields as columns", "separate them by commas"
            )
        yield reader.line_num, row


def _from_json(path: Path, text: str) -> tuple[str, int | None, Iterator[Row]]:
    content = parse_json(path, text)
    if isinstance(content, list):
        content = {"layers": content}
    if not isinstance(content, dict) or not isinstance(content.get("layers"), list):
        raise refused(path, 1, "no list of layers", 'write {"batch": …, "layers": […]}')
    batch = content.get("batch")
    if batch is not None and (type(batch) is not int or not 1 <= batch <= MOST_BATCH):
        way_out = f"give the rows of a step, 1 to {MOST_BATCH:g}"
        raise refused(path, None, f"batch {shown(batch)}", way_out)
    try:
        name = _name(content.get("name", path.stem), "the table")
    except ConfigError as error:
        raise refused(path, None, str(error), "give it another name") from error
    return name, batch, _json_rows(path, text, content["layers"])


def _json_rows(path: Path, text: str, entries: list[Any]) -> Iterator[Row]:
    """Yield entries with their lines: each layer has one ``"layer":``, in the same order."""
    starts = (match.start() for match in re.finditer(r'"layer"\s*:', text))
    line: int | None = 1
    counted_to = 0
    for index, entry in enumerate(entries):
        start = next(starts, None)
        line = None if line is None or start is None else line + text.count("\n", counted_to, start)
        counted_to = start or 0
        if not isinstance(entry, dict) or "layer" not in entry:
            raise refused(path, None, f"entry {index + 1} names no layer", _FORMAT)
        yield line, entry


def _layer(path: Path, line: int | None, row: Mapping[str, Any]) -> Layer:
    try:
        name = _name(row["layer"], "the layer")
        shapes = _shapes(row.get("shape"))
        return Layer(
            name,
            _kind(row.get("kind"), shapes),
            shapes,
            forward_ms=_milliseconds(row, "forward_ms"),
            backward_ms=_milliseconds(row, "backward_ms"),
        )
    except ConfigError as error:
        raise refused(path, line, str(error), _FORMAT) from error


def _shapes(value: Any) -> tuple[Shape, ...]:
    """Parse ``"1000x2048;1000"``, ``[1000, 2048]`` or ``[[1000, 2048], [1000]]``."""
    if isinstance(value, str):
        value = [part.strip().lower().split("x") for part in value.split(";") if part.strip()]
    elif value is None:
        value = []
    elif isinstance(value, list) and value and not isinstance(value[0], list):
        value = [value]
    try:
        shapes = tuple(tuple(int(size) for size in shape) for shape in value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"shape {shown(value)} is not understood: write 1000x2048;1000") from None
    if len(shapes) > MOST_SHAPES:
        raise ConfigError(f"{len(shapes)} shapes, but a layer has at most {MOST_SHAPES}")
    if not all(shape and min(shape) > 0 for shape in shapes):
        raise ConfigError(f"shape {shown(value)} holds nothing")
    if max((len(shape) for shape in shapes), default=0) > MOST_DIMENSIONS:
        raise ConfigError(f"shape {shown(value)} has more than {MOST_DIMENSIONS} dimensions")
    if max((max(shape) for shape in shapes), default=0) > MOST_PARAMETERS:
        raise ConfigError(f"shape {shown(value)} has more than {MOST_PARAMETERS:.0e} parameters")
    return shapes


def _kind(value: Any, shapes: tuple[Shape, ...]) -> Kind:
    if not value:
        dimensions = len(shapes[0]) if shapes else 0
        value = "fc" if dimensions == 2 else "conv" if dimensions > 2 else "other"
    if value not in KINDS:
        raise ConfigError(f"kind {shown(value)} is not one of {', '.join(KINDS)}")
    if value == "fc" and (not shapes or len(shapes[0]) != 2):
        raise ConfigError("an fc layer's weight has two dimensions, outputs and inputs")
    kind: Kind = value
    return kind


def _milliseconds(row: Mapping[str, Any], column: str) -> float:
    content = row.get(column)
    try:
        value = math.nan if content is None or isinstance(content, bool) else float(content)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0 <= value <= MOST_MS:
        problem = f"{column} is {shown(content)}, not a number of milliseconds"
        raise ConfigError(f"{problem} from 0 to {MOST_MS:g}")
    return value


def _name(value: Any, whose: str) -> str:
    name = str(value).strip() if isinstance(value, str | int) else ""
    if not name:
        raise ConfigError(f"{whose} has no name")
    if not name.isprintable() or len(name) > MOST_LETTERS:
        raise ConfigError(f"{whose} is called {shown(name)}: give {MOST_LETTERS} printable letters")
    return name


def _refuse_duplicates(path: Path, layers: tuple[Layer, ...]) -> None:
    names = Counter(layer.name for layer in layers)
    twice = sorted(name for name, times in names.items() if times > 1)
    if twice:
        raise refused(path, None, f"layer {twice[0]!r} appears twice", "name every layer once")
