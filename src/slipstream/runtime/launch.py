"""Starting the workers of a job on this machine, and seeing all of them to their end."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import LaunchError
from slipstream.runtime.crew import Crew, say
from slipstream.runtime.environment import LOOPBACK, address_of
from slipstream.runtime.processes import (
    SERVER_COMMAND,
    Placement,
    ServerProcess,
    inherited_environment,
    spawn_server,
)
from slipstream.runtime.supervision import Limits, Verdict
from slipstream.transports.credentials import Credentials, stretch


@dataclass(frozen=True, slots=True)
class Settings:
    """What the workers of a job are told, beyond who they are.

    With an ``address`` other than the loopback, rank 0 is somewhere else (a namespace), and so is
    every other worker, each on a host of its own: rank 0 then listens at ``port`` itself, and the
    port must be given.
    """

    strategy: str | None = None
    secret: str | None = None
    encrypt: bool | None = None  # None: between hosts
    address: str = LOOPBACK
    port: int = 0
    interface: str | None = None
    json: Path | None = None
    log: Path | None = None
    tensorboard: Path | None = None
    prometheus: int | None = None


def launch(
    command: Sequence[str],
    workers: Sequence[Placement],
    *,
    servers: Sequence[Placement] = (),
    settings: Settings | None = None,
    limits: Limits | None = None,
    may_lose: int = 0,
    restarts: int = 0,
    server_command: Sequence[str] = SERVER_COMMAND,
) -> int:
    """Runs ``command`` once a placement; returns the exit code of the job.

    Rank 0 has this process's terminal, the others' lines come under their name. When one fails,
    the rest are stopped, one line says which, and its code is returned (128 + n for signal n);
    of workers after rank 0, ``may_lose`` may fail while the rest go on, and ``restarts`` are
    started again, to come back into the job.
    Nothing it started is left when it returns, nor when this process is killed. Call it from the
    main thread: it takes over SIGINT, SIGTERM and SIGHUP for as long as it runs.
    """
    settings = settings or Settings()
    secret = settings.secret or secrets.token_hex(32)
    job = secrets.token_hex(16)
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(settings)) if _holds_port(settings) else None
        crew = stack.enter_context(Crew(limits or Limits(), may_lose=may_lose, restarts=restarts))
        shards = _add_servers(crew, servers, secret, job, settings, server_command)
        if crew.servers_announced():
            env = job_environment(
                settings,
                workers=len(workers),
                MASTER_ADDR=settings.address,
                MASTER_PORT=listener.getsockname()[1] if listener else settings.port,
                SLIPSTREAM_JOB=job,
                SLIPSTREAM_SECRET=secret,
                SLIPSTREAM_ENCRYPT=None if settings.encrypt is None else int(settings.encrypt),
                SLIPSTREAM_SERVER_ADDRESSES=",".join(shard.address for shard in shards) or None,
                SLIPSTREAM_INTERFACE=settings.interface,
            )
            _add_workers(crew, command, workers, env, listener)
        verdict = crew.wait()
    report(verdict)
    return verdict.code


def _add_servers(
    crew: Crew,
    placements: Sequence[Placement],
    secret: str,
    job: str,
    settings: Settings,
    command: Sequence[str],
) -> list[ServerProcess]:
    shards = []
    apart = settings.address != LOOPBACK
    encrypt = apart if settings.encrypt is None else settings.encrypt
    credentials = Credentials.for_run(stretch(secret.encode()), job.encode(), encrypt=encrypt)
    for index, placement in enumerate(placements):
        shard = spawn_server(
            index=index,
            credentials=credentials,
            bind=_bind_address(placement, settings),
            placement=placement,
            command=command,
        )
        crew.add_server(shard)
        shards.append(shard)
    return shards


def _bind_address(placement: Placement, settings: Settings) -> str:
    if settings.interface and settings.address != LOOPBACK:
        return address_of(settings.interface)
    return placement.address or settings.address


def _add_workers(
    crew: Crew,
    command: Sequence[str],
    placements: Sequence[Placement],
    env: dict[str, str],
    listener: socket.socket | None,
) -> None:
    for rank, placement in enumerate(placements):
        own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank if listener is not None else 0)}
        fds: tuple[int, ...] = ()
        if rank == 0 and listener is not None:
            fds = (listener.fileno(),)
            own["SLIPSTREAM_STORE_FD"] = str(listener.fileno())
        if rank > 0:
            own.setdefault("PYTHONUNBUFFERED", "1")  # into a pipe, lines would come late or never
        crew.add_worker(
            f"rank {rank}", command, own, placement, has_terminal=rank == 0, pass_fds=fds
        )
    if listener is not None:
        listener.close()


def job_environment(settings: Settings, *, workers: int, **told: object) -> dict[str, str]:
    """What every worker of a job finds in its environment; ``told`` is about this kind of job."""
    told |= {
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": workers if settings.address == LOOPBACK else 1,
        "SLIPSTREAM_LAUNCHER": os.getpid(),
        "SLIPSTREAM_STRATEGY": settings.strategy,
        "SLIPSTREAM_JSON": settings.json and settings.json.absolute(),
        "SLIPSTREAM_LOG": settings.log and settings.log.absolute(),
        "SLIPSTREAM_TENSORBOARD": settings.tensorboard and settings.tensorboard.absolute(),
        "SLIPSTREAM_PROMETHEUS": settings.prometheus,
    }
    env = {"OMP_NUM_THREADS": str(max(1, _cores() // workers))} | inherited_environment()
    return env | {name: str(value) for name, value in told.items() if value is not None}


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _holds_port(settings: Settings) -> bool:
    if settings.address == LOOPBACK:
        return True
    if not settings.port:
        raise LaunchError(
            f"rank 0 listens at {settings.address}, where no free port can be picked from here; "
            "give one"
        )
    return False


def _listen(settings: Settings) -> socket.socket:
    """The job's meeting point, listening before anyone starts: rank 0 inherits it, so that no
    other program can take the port in between."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.address, settings.port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise LaunchError(
            f"port {settings.port} on {settings.address} cannot be used: {reason}; choose another "
            "with --port, or leave it out for a free one"
        ) from error
    return listener


def report(verdict: Verdict) -> None:
    """One line, unless all went well."""
    if not verdict.line:
        return
    with contextlib.suppress(OSError):
        if sys.stderr.isatty():
            # A progress bar that was cut off leaves the cursor hidden, in the middle of a line.
            sys.stderr.write("\x1b[?25h\n")
    say(verdict.line)
