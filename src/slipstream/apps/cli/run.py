"""``slipstream run``: runs any training script on several workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from slipstream.apps.cli import options
from slipstream.apps.cli.places import places
from slipstream.errors import LaunchError
from slipstream.methods import SharedMemoryUpdates
from slipstream.runtime.launch.launch import Settings, launch
from slipstream.systems import parse


@options.with_settings
def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file, or a module's name after -m.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="Passed to the script unchanged."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, not a file.")] = False,
    workers: options.WorkersOrHosts = None,
    strategy: options.Strategy = None,
    parts: options.Parts = None,
    servers: options.Servers = 0,
    may_lose: options.MayLose = 0,
    restarts: options.Restarts = None,
    lab: options.LabHosts = None,
    *,
    settings: Callable[[], Settings],
) -> None:
    """Run a training script on several workers: processes of this machine, or hosts of a lab."""
    command = [sys.executable, *_program(script, module), *(arguments or [])]
    modules = options.part_modules(parts)
    if modules:  # servers find modules where this process does, and the script's are in its folder
        sys.path.append(str(Path.cwd() if module else Path(script).resolve().parent))
    method = None if strategy is None else parse(strategy, parts=modules).method
    learners = method if isinstance(method, SharedMemoryUpdates) else None
    if learners is not None and (lab is not None or servers):
        raise LaunchError(
            f"{strategy}: learners share the memory of one machine, and have a server of their "
            "own: leave out --lab and --servers"
        )
    with places(lab, workers, servers, settings()) as where:
        code = launch(
            command,
            where.workers,
            servers=where.servers,
            settings=where.settings,
            may_lose=may_lose,
            restarts=restarts,
            learners=learners,
        )
    raise typer.Exit(code)


def _program(script: str, module: bool) -> list[str]:
    if module:
        return ["-m", script]
    if not Path(script).exists():
        raise LaunchError(
            f"there is no script {script!r} in {Path.cwd()}; give its path, or -m and a module"
        )
    return [script]
