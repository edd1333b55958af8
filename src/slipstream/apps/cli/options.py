"""The options that all commands that start a job share."""

from __future__ import annotations

import functools
import inspect
import json as jsonlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.errors import LaunchError, RuntimeFault
from slipstream.part_modules import module_names
from slipstream.runtime.files.record_file import write_json
from slipstream.runtime.launch.launch import Settings
from slipstream.runtime.process.environment import listed, read_secret

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
    typer.Option(min=0, help="Dedicated server processes; 0: colocated with the first worker."),
]
MayLose = Annotated[
    int,
    typer.Option(
        min=0,
        help="Workers that may die while the rest continue, if the strategy allows it.",
    ),
]
Restarts = Annotated[
    int | None,
    typer.Option(
        min=0,
        show_default="10 with gadei, else 0",
        help="How many killed workers are started again, in all, if the strategy allows it "
        "(ako, gadei).",
    ),
]
Parts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE",
        help="A module with parts of your own, which workers and servers may import; may be "
        "repeated. Else SLIPSTREAM_PARTS, with commas.",
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the job's metrics to this file at its end.")
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
        help="Read the job secret from this file; else SLIPSTREAM_SECRET, or a random one."
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
    typer.Option(min=0, max=65535, help="Port of the workers' rendezvous; 0 takes a free one."),
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
    parts: Parts = None,
) -> Settings:
    """Check what can be checked before any process starts."""
    modules = part_modules(parts)
    if strategy is not None:
        # Imported here, because the systems are slow to import and --help does not need them.
        from slipstream.systems import parse

        parse(strategy, parts=modules)
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
        parts=modules,
    )


def part_modules(requested: Sequence[str] | None) -> tuple[str, ...]:
    """Return the modules of ``--parts``, else those of the environment."""
    return module_names(requested or listed(os.environ.get("SLIPSTREAM_PARTS", ""), ""))


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of ``settings`` to a command, after its own, and pass it a function.

    The command declares a parameter ``settings``, and calls it once its own checks have passed,
    since the call creates folders for results. The command itself declares those options of
    ``settings`` that it also needs, or whose position in ``--help`` is another.
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
    """Check that ``--json`` and ``--plot`` files can be written at the end."""
    for option, file in (("--json", json), ("--plot", plot)):
        if file is not None:
            prepare_file(option, file)
    if plot is not None and plot.suffix.lower() not in PLOT_SUFFIXES:
        raise LaunchError(f"--plot {plot}: a name ends in {' or '.join(PLOT_SUFFIXES)}")
    if plot is not None and find_spec("matplotlib") is None:
        raise LaunchError("--plot needs matplotlib; pip install 'slipstream[bench]'")


def prepare_file(option: str, file: Path) -> None:
    """Check early that a result file can be written, not hours later."""
    if file.is_dir():
        raise LaunchError(f"{option} {file}: that is a folder; name a file in it")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{option} {file}: no such folder can be made: {error}") from error
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise LaunchError(f"{option} {file} cannot be written; choose another place")


def write_report(file: Path, report: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write the ``--json`` report. If that fails, print it, since measuring takes long."""
    with writing("--json", file, instead=lambda: f"; here it is:\n{jsonlib.dumps(report)}"):
        write_json(file, report, indent=indent)


@contextmanager
def writing(option: str, file: Path, instead: Callable[[], str] = str) -> Iterator[None]:
    """Let a requested file be written in the block; turn an OSError into a clear message."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RuntimeFault(f"{option} {file} cannot be written ({reason}){instead()}") from error


def _secret(file: Path | None) -> str | None:
    secret = read_secret({"SLIPSTREAM_SECRET_FILE": str(file)} if file else os.environ)
    return secret.decode() if secret else None
