"""Layer tables: nets as rows of (name, kind, shapes, flops, forward ms, backward ms).

Times are proportional to flops, a third of them forward, and add up to the speed of one device in
the Poseidon paper; each table's ``origin`` gives the source of its speed. A table may also be read
from a file. Planners and emulated devices use them; torch is not needed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from slipstream.apps.bench.tables.alexnet import alexnet
from slipstream.apps.bench.tables.files import SUFFIXES, read_table
from slipstream.apps.bench.tables.googlenet import googlenet
from slipstream.apps.bench.tables.inception import inception_v3
from slipstream.apps.bench.tables.layers import Kind, Layer, Shape, Table
from slipstream.apps.bench.tables.resnet import resnet152
from slipstream.apps.bench.tables.vgg import vgg19, vgg19_22k
from slipstream.errors import ConfigError

__all__ = ["TABLES", "Kind", "Layer", "Shape", "Table", "read_table", "table"]

TABLES: dict[str, Callable[[], Table]] = {
    "vgg19": vgg19,
    "vgg19-22k": vgg19_22k,
    "googlenet": googlenet,
    "inception-v3": inception_v3,
    "resnet-152": resnet152,
    "alexnet": alexnet,
}


def table(name: str) -> Table:
    """Return the built-in table of this name, or the one in this file."""
    known = name.strip().lower().replace("_", "-")
    if known in TABLES:
        return TABLES[known]()
    if Path(name).suffix.lower() in SUFFIXES:
        return read_table(Path(name))
    near = difflib.get_close_matches(known, TABLES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"no layer table {name!r}: there are {', '.join(TABLES)}, or give a file that ends in "
        f"{' or '.join(SUFFIXES)}{hint}"
    )
