"""``slipstream plan``: shows how every layer of a model would be sent, without training."""

from __future__ import annotations

import importlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from slipstream.apps.bench.tables import TABLES, table
from slipstream.apps.cli.options import prepare_file, write_report
from slipstream.errors import ConfigError
from slipstream.planning.costs import Speeds
from slipstream.planning.table import as_text, total
from slipstream.printable import printable
from slipstream.systems import parse
from slipstream.types import Cluster, Spec
from slipstream.units import bits_per_second

MOST_MEMBERS, MOST_ROWS = 100_000, 10**9


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A layer table (vgg19, vgg19-22k, googlenet, inception-v3, resnet-152, alexnet, "
            "or a .csv or .json file), or module:factory, which returns an nn.Module.",
        ),
    ],
    workers: Annotated[int, typer.Option(min=1, max=MOST_MEMBERS, help="Workers.")] = 16,
    servers: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_MEMBERS,
            help="Dedicated servers; 0: none, or one colocated with each worker.",
        ),
    ] = 0,
    rate: Annotated[str, typer.Option(help="Rate of every link, such as 10gbit.")] = "10gbit",
    batch: Annotated[
        int, typer.Option(min=1, max=MOST_ROWS, help="Samples per step and worker.")
    ] = 32,
    rows: Annotated[
        int,
        typer.Option(min=1, max=MOST_ROWS, help="Rows per sample of a linear layer (tokens)."),
    ] = 1,
    strategy: Annotated[str, typer.Option(help="The system, as in Python.")] = "poseidon",
    gemm_gflops: Annotated[
        float, typer.Option(min=0.001, help="A worker's speed of matrix products.")
    ] = 5000.0,
    server_gbytes: Annotated[
        float, typer.Option(min=0.001, help="A server's speed of summing, in GB/s.")
    ] = 5.0,
    json: Annotated[Path | None, typer.Option("--json", help="Write the plan here.")] = None,
) -> None:
    """Show how each layer would be sent, and the predicted gain over plain dense."""
    if json is not None:
        prepare_file("--json", json)
    specs = read_model(model)
    chosen = parse(strategy)
    cluster = Cluster(workers, servers or workers, dedicated=bool(servers))
    planned = chosen.plan(specs, cluster)
    speeds = Speeds(bits_per_second(rate), gemm_gflops * 1e9, server_gbytes * 1e9)
    table_rows = planned.rows(planned.verdicts(batch * rows, speeds), speeds)
    sums = total(table_rows)
    title = f"{model}: {chosen.name} on {workers} workers, batch {batch} each, links of {rate}"
    print(f"{printable(title)}\n")
    print(as_text(table_rows))
    if json is not None:
        report = {
            "model": model,
            "strategy": chosen.name,
            "workers": workers,
            "servers": servers,
            "rate": rate,
            "batch": batch,
            "rows": [asdict(row) for row in table_rows],
            "totals": asdict(sums) | {"speedup": sums.speedup},
        }
        write_report(json, report)


def read_model(text: str) -> list[Spec]:
    """Return the tensors of a layer table, or of the module that a factory makes."""
    module, colon, factory = text.partition(":")
    if not colon:
        if text not in TABLES and Path(text).suffix not in (".csv", ".json"):
            raise ConfigError(
                f"no model {text!r}: name a layer table ({', '.join(TABLES)}), a .csv or .json "
                "file with one, or module:factory"
            )
        return list(table(text).specs)
    sys.path.insert(0, "")  # as with `python -m`
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot make the model {text!r}: {error}") from error
    try:
        model = make() if callable(make) else make
    except (ImportError, AttributeError) as error:  # the model's own errors keep their traceback
        raise ConfigError(f"cannot make the model {text!r}: {error}") from error
    if not hasattr(model, "named_parameters"):
        raise ConfigError(f"{text!r} gives a {type(model).__name__}; name what makes an nn.Module")
    from slipstream.torch.tensors.inventory import Inventory

    return list(Inventory.of(model).specs)
