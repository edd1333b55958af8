"""``slipstream run``: any training script, on several workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import options
from slipstream.cli.places import places
from slipstream.errors import LaunchError
from slipstream.runtime.launch import launch
from slipstream.runtime.launch_learners import RESTARTS, launch_learners
from slipstream.systems import parse


def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file, or a module's name after -m.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="Passed to the script as they are."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, not a file.")] = False,
    workers: options.WorkersOrHosts = None,
    strategy: options.Strategy = None,
    servers: options.Servers = 0,
    may_lose: options.MayLose = 0,
    restarts: options.Restarts = None,
    lab: options.LabHosts = None,
    json: options.JsonFile = None,
    log: options.LogFile = None,
    tensorboard: options.TensorBoard = None,
    prometheus: options.Prometheus = None,
    secret_file: options.SecretFile = None,
    encrypt: options.Encrypt = None,
    port: options.Port = 0,
    interface: options.Interface = None,
) -> None:
    """Run a training script on several workers: processes of this machine, or hosts of a lab."""
    settings = options.settings(
        strategy=strategy,
        json=json,
        log=log,
        tensorboard=tensorboard,
        prometheus=prometheus,
        secret_file=secret_file,
        encrypt=encrypt,
        port=port,
        interface=interface,
    )
    command = [sys.executable, *_program(script, module), *(arguments or [])]
    one_machine = None if strategy is None else parse(strategy).one_machine
    if one_machine is not None:
        if lab is not None or servers:
            raise LaunchError(
                f"{strategy}: learners share the memory of one machine, and have a server of their "
                "own: leave out --lab and --servers"
            )
        code = launch_learners(
            command,
            workers or 1,
            settings=settings,
            may_lose=may_lose,
            restarts=RESTARTS if restarts is None else restarts,
            checkpoints=one_machine.checkpoints,
        )
        raise typer.Exit(code)
    with places(lab, workers, servers, settings) as where:
        code = launch(
            command,
            where.workers,
            servers=where.servers,
            settings=where.settings,
            may_lose=may_lose,
            restarts=restarts or 0,
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
