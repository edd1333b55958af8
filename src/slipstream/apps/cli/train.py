"""``slipstream train``: built-in first runs, on real data that needs no download."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated

import typer

from slipstream.apps.cli import options
from slipstream.errors import LaunchError
from slipstream.runtime.launch.launch import Settings, launch
from slipstream.runtime.launch.processes import Placement

app = typer.Typer(name="train", help="Train a built-in example.", no_args_is_help=True)


@app.callback()
def _examples() -> None:
    pass  # keeps `digits` a subcommand while it is the only example


@app.command()
@options.with_settings
def digits(
    workers: options.Workers = 4,
    strategy: options.Strategy = None,
    servers: options.Servers = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training data.")] = 12,
    batch: Annotated[int, typer.Option(min=1, help="Samples per step, over all workers.")] = 60,
    lr: Annotated[float, typer.Option(min=0.0, help="Highest learning rate.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of weights and of the data's order.")] = 0,
    *,
    settings: Callable[[], Settings],
) -> None:
    """Train a small convolutional net on scikit-learn's handwritten digits."""
    if find_spec("sklearn") is None:
        raise LaunchError(
            "the digits come with scikit-learn, which is missing; pip install 'slipstream[train]'"
        )
    if batch < workers:
        raise LaunchError(
            f"--batch {batch} leaves some of {workers} workers without a sample; raise it to "
            f"{workers} or more, or start fewer workers"
        )
    # -P: a file in the current folder must not replace a module.
    command = [sys.executable, "-P", "-m", "slipstream.apps.cli.digits"]
    command += [
        f"--{name}={value}"
        for name, value in {"epochs": epochs, "batch": batch, "lr": lr, "seed": seed}.items()
    ]
    places = [Placement()] * workers
    raise typer.Exit(launch(command, places, servers=[Placement()] * servers, settings=settings()))
