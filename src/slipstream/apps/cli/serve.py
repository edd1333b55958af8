"""``slipstream serve`` and ``slipstream keys``."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from slipstream.apps.service.data_directory import DataDirectory
from slipstream.apps.service.database import Database
from slipstream.apps.service.keys import add_key, any_key, list_keys, revoke_key, take_local
from slipstream.apps.service.rows import Limits
from slipstream.apps.service.serve_options import (
    DATABASE_VARIABLE,
    METRICS_KEY_VARIABLE,
    MIB,
    ServeOptions,
)
from slipstream.errors import ConfigError

DEFAULTS = ServeOptions(data="slipstream-data")
Data = Annotated[str, typer.Option(help="The data directory.")]
DatabaseAddress = Annotated[
    str,
    typer.Option(
        envvar=DATABASE_VARIABLE,
        help="A path (SQLite, made if it is missing) or postgresql://…; by default SQLite in the "
        "data directory.",
    ),
]
MOST_CLASSIFIERS = 1_000_000  # a quota: in effect, no limit
MOST_TEXT = 100_000  # characters; a collection of 30 such texts still fits into memory
keys = typer.Typer(name="keys", help="API keys of the service.", no_args_is_help=True)


def serve(
    data: Data = DEFAULTS.data,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = DEFAULTS.host,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: any free one.")] = DEFAULTS.port,
    database: DatabaseAddress = "",
    learners: Annotated[
        int, typer.Option(min=1, max=1_024, help="Processes of a job.")
    ] = DEFAULTS.learners,
    jobs: Annotated[
        int, typer.Option(min=1, max=1_024, help="Jobs that train at once.")
    ] = DEFAULTS.jobs,
    queue: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Maximum number of queued jobs.")
    ] = DEFAULTS.queue,
    epochs: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Epochs of a job.")
    ] = DEFAULTS.epochs,
    rate: Annotated[
        int, typer.Option(min=1, max=1_000_000_000, help="Maximum requests per minute and tenant.")
    ] = DEFAULTS.rate,
    quota: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_CLASSIFIERS, help="Maximum classifiers that are made without a key."
        ),
    ] = DEFAULTS.quota,
    max_rows: Annotated[
        int, typer.Option(min=5, max=100_000_000, help="Maximum rows of training data.")
    ] = Limits().max_rows,
    max_classes: Annotated[
        int, typer.Option(min=2, max=1_000_000, help="Maximum classes of training data.")
    ] = Limits().max_classes,
    max_text: Annotated[
        int, typer.Option(min=1, max=MOST_TEXT, help="Maximum characters of a row's text.")
    ] = Limits().text_chars,
    max_body: Annotated[
        int, typer.Option(min=1, max=1_048_576, help="Maximum MiB of an upload.")
    ] = DEFAULTS.max_body // MIB,
    max_model: Annotated[
        int, typer.Option(min=1, max=1_048_576, help="Maximum MiB of a model.")
    ] = DEFAULTS.max_model // MIB,
    connections: Annotated[
        int, typer.Option(min=8, max=1_000_000, help="Maximum open connections.")
    ] = DEFAULTS.connections,
    public_url: Annotated[str, typer.Option(help="The beginning of 'url' fields.")] = "",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A host name that requests may use when there are no keys."),
    ] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="Trust X-Forwarded-* headers.")
    ] = False,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Serve without keys.")] = False,
    metrics_key: Annotated[
        str, typer.Option(envvar=METRICS_KEY_VARIABLE, help="Bearer key of /metrics.")
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Check the data, then end.")] = False,
) -> None:
    """Serve training and classification of texts (Watson NLC's API)."""
    try:
        from slipstream.apps.service import serve as service
    except ImportError as error:
        raise ConfigError(
            f"the service needs {error.name}: pip install 'slipstream[serve]'"
        ) from error
    options = ServeOptions(
        data=data,
        host=host,
        port=port,
        database=database,
        learners=learners,
        jobs=jobs,
        queue=queue,
        epochs=epochs,
        rate=rate,
        quota=quota,
        limits=Limits(max_rows=max_rows, max_classes=max_classes, text_chars=max_text),
        max_body=max_body * MIB,
        max_model=max_model * MIB,
        connections=connections,
        public_url=public_url,
        allow_host=tuple(allow_host or ()),
        behind_proxy=behind_proxy,
        no_auth=no_auth,
        metrics_key=metrics_key,
    )
    if not check:
        service.serve(options)
        return
    _require(data)
    for problem in (problems := service.check(options)):
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"{data}: ok")


def _open(data: str, address: str) -> Database:
    os.umask(0o077)  # as in the service
    return DataDirectory(data).migrated(address)


def _require(data: str) -> None:
    """Check that a service has created the directory; otherwise an empty one would pass."""
    if not _is_of_service(data):
        raise ConfigError(f"{data} is no data directory of a service; give the right one (--data)")


def _is_of_service(data: str) -> bool:
    return (Path(data) / "classifiers").is_dir()


@keys.command("add")
def add(
    name: Annotated[str, typer.Argument(help="The tenant; it may have several keys.")],
    quota: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_CLASSIFIERS, help="Classifiers; 8 for a new tenant."),
    ] = None,
    data: Data = DEFAULTS.data,
    database: DatabaseAddress = "",
) -> None:
    """Create a key and print it, once. The first key's tenant gets what was made without one."""
    is_new = not _is_of_service(data)
    with _open(data, database) as opened, opened.transaction() as transaction:
        is_first = not any_key(transaction)
        key = add_key(transaction, name, quota)
        num_taken = take_local(transaction, name) if is_first else 0
    typer.echo(key)
    if is_first:
        typer.echo(
            f"From now on every request to the service of {data} needs a key. {name} owns the "
            f"classifiers that were made without one: {num_taken}.",
            err=True,
        )
    if is_new:
        typer.echo(
            f"{data} was made for this key, and no service uses it yet: start one with --data "
            f"{data}, or give the directory of the one that runs (--data).",
            err=True,
        )


@keys.command("list")
def list_(data: Data = DEFAULTS.data, database: DatabaseAddress = "") -> None:
    """List all keys."""
    _require(data)
    with _open(data, database) as opened, opened.reading() as reading:
        rows = list_keys(reading)
        for row in rows:
            state = "revoked" if row["revoked"] else "valid"
            used = _day(row["used"]) if row["used"] else "never"
            typer.echo(
                f"{row['prefix']}…  {row['name']}  quota {row['quota']}  {state}  "
                f"made {_day(row['created'])}  used {used}"
            )
    if not rows:
        typer.echo(f"{data} has no keys: its service takes requests without one", err=True)


@keys.command("revoke")
def revoke(
    prefix: Annotated[str, typer.Argument(help="The beginning of the key.")],
    data: Data = DEFAULTS.data,
    database: DatabaseAddress = "",
) -> None:
    """Revoke a key at once."""
    _require(data)
    with _open(data, database) as opened, opened.transaction() as transaction:
        name = revoke_key(transaction, prefix)
    typer.echo(f"revoked a key of {name}")


def _day(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d")
