"""The options that every command which starts a job shares."""

from __future__ import annotations

import functools
import inspect
import json as jsonlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.errors import LaunchError, RuntimeFault
from slipstream.runtime.environment import read_secret
from slipstream.runtime.files.record_file import write_json
from slipstream.runtime.launch.launch import Settings

Workers = Annotated[int, typer.Option(min=1, help="Worker processes to start on this machine.")]
WorkersOrHosts = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Worker processes; 1 by default, or as many as the lab has hosts. More than it has "
        "hosts: equally many on each.",
    ),
]
LabHosts = Annotated[
    str | None,
    typer.Option(
        "--lab",
        help="Run on hosts with slow links: hosts x rate, such as 4x200mbit, made for this run "
        "(needs root), or the name of a lab that is up.",
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        envvar="SLIPSTREAM_STRATEGY",
        help="The system to train with, such as push_pull or 'push_pull(overlap=False)'.",
    ),
]
Servers = Annotated[
    int,
    typer.Option(min=0, help="Dedicated server processes; 0 puts one beside the first worker."),
]
MayLose = Annotated[
    int,
    typer.Option(
        min=0,
        help="Workers that may die while the rest go on, where the strategy can do without.",
    ),
]
Restarts = Annotated[
    int | None,
    typer.Option(
        min=0,
        show_default="10 with gadei, else 0",
        help="How often, in all, a worker that was killed is started again, to come back where the "
        "strategy lets it (ako, gadei).",
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the job's figures to this file at its end.")
]
LogFile = Annotated[Path | None, typer.Option("--log", help="Write a run log (JSON lines).")]
TensorBoard = Annotated[
    Path | None, typer.Option("--tensorboard", help="Write TensorBoard events to this folder.")
]
Prometheus = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Serve Prometheus metrics at this port.")
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        help="Read the job secret from this file; else SLIPSTREAM_SECRET, or one is made up."
    ),
]
Encrypt = Annotated[
    bool | None,
    typer.Option(
        "--encrypt/--no-encrypt",
        envvar="SLIPSTREAM_ENCRYPT",
        help="Encrypt links, or not; by default those between hosts. All are authenticated.",
        show_default=False,
    ),
]
Port = Annotated[
    int,
    typer.Option(min=0, max=65535, help="Port where the workers meet; 0 takes a free one."),
]
Interface = Annotated[
    str | None,
    typer.Option(
        envvar="SLIPSTREAM_INTERFACE", help="Network interface or address that links use."
    ),
]


PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def settings(
    strategy: Strategy = None,
    json: JsonFile = None,
    log: LogFile = None,
    tensorboard: TensorBoard = None,
    prometheus: Prometheus = None,
    secret_file: SecretFile = None,
    encrypt: Encrypt = None,
    port: Port = 0,
    interface: Interface = None,
) -> Settings:
    """Checks what can be checked before any process starts."""
    if strategy is not None:
        # Here, because the systems take a moment to import and --help does not need them.
        from slipstream.systems import parse

        parse(strategy)
    for option, file in (("--json", json), ("--log", log)):
        if file is not None:
            prepare_file(option, file)
    return Settings(
        strategy=strategy,
        secret=_secret(secret_file),
        encrypt=encrypt,
        port=port,
        interface=interface,
        json=json,
        log=log,
        tensorboard=tensorboard,
        prometheus=prometheus,
    )


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of ``settings``, after its own, and a function that makes those.

    The command declares a parameter ``settings``, and calls it once its own checks have passed,
    since that makes folders for results; of ``settings``' options it declares those that
    it also wants for itself, or elsewhere in the order of ``--help``.
    """
    own = dict(inspect.signature(command, eval_str=True).parameters)
    del own["settings"]
    shared = inspect.signature(settings, eval_str=True).parameters

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        make = functools.partial(settings, **{name: given[name] for name in shared})
        command(settings=make, **{name: given[name] for name in own})

    options = {**own, **{name: shared[name] for name in shared if name not in own}}
    setattr(with_options, "__signature__", inspect.Signature(list(options.values())))  # noqa: B010
    with_options.__annotations__ = {name: options[name].annotation for name in options}
    return with_options


def prepare_reports(json: Path | None, plot: Path | None) -> None:
    """Refuse ``--json`` and ``--plot`` files that could not be written at the end."""
    for option, file in (("--json", json), ("--plot", plot)):
        if file is not None:
            prepare_file(option, file)
    if plot is not None and plot.suffix.lower() not in PLOT_SUFFIXES:
        raise LaunchError(f"--plot {plot}: a name ends in {' or '.join(PLOT_SUFFIXES)}")
    if plot is not None and find_spec("matplotlib") is None:
        raise LaunchError("--plot needs matplotlib; pip install 'slipstream[bench]'")


def prepare_file(option: str, file: Path) -> None:
    """Hours later would be a bad time to find out that a result has no place to go."""
    if file.is_dir():
        raise LaunchError(f"{option} {file}: that is a folder; name a file in it")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{option} {file}: no such folder can be made: {error}") from error
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise LaunchError(f"{option} {file} cannot be written; choose another place")


def write_report(file: Path, report: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """What ``--json`` asked for. It is printed if it cannot be written: measuring takes long."""
    with writing("--json", file, instead=lambda: f"; here it is:\n{jsonlib.dumps(report)}"):
        write_json(file, report, indent=indent)


@contextmanager
def writing(option: str, file: Path, instead: Callable[[], str] = str) -> Iterator[None]:
    """Within, a file that was asked for is written; that it cannot be is no bug of ours."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RuntimeFault(f"{option} {file} cannot be written ({reason}){instead()}") from error


def _secret(file: Path | None) -> str | None:
    secret = read_secret({"SLIPSTREAM_SECRET_FILE": str(file)} if file else os.environ)
    return secret.decode() if secret else None
