"""The command line. It does not import torch, so that ``--help`` answers at once."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer
from rich.console import Console

from slipstream.apps.cli import (
    bench,
    lab,
    plan,
    plan_backups,
    plan_tree,
    predict,
    probe,
    run,
    serve,
    train,
)
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.printable import printable_lines

app = typer.Typer(
    name="slipstream",
    help="Data-parallel PyTorch training for slow networks, stragglers and small batches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Everything after the script belongs to the script, also options and --help.
app.command(context_settings={"allow_interspersed_args": False})(run.run)
app.command()(bench.bench)
app.command()(plan.plan)
app.command()(plan_backups.plan_backups)
app.command()(plan_tree.plan_tree)
app.command()(predict.predict)
app.command()(probe.probe)
app.command()(serve.serve)
app.add_typer(serve.keys)
app.add_typer(train.app)
app.add_typer(lab.app)


def main() -> None:
    """Run the ``slipstream`` command."""
    try:
        app(prog_name="slipstream")
    except SlipstreamError as error:
        message = printable_lines(f"slipstream: {error}")
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            message, style="red", markup=False
        )
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"slipstream {metadata.version('slipstream')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass
