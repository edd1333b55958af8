"""The launcher: it starts the workers of a job on this machine, and waits for their end."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import LaunchError
from slipstream.methods import SharedMemoryUpdates
from slipstream.runtime.files.directory_lock import DirectoryLocks
from slipstream.runtime.launch.learner_supervisor import RESTARTS, LearnerSupervisor
from slipstream.runtime.launch.process_group import ProcessGroup, log_line
from slipstream.runtime.launch.processes import (
    SERVER_COMMAND,
    Placement,
    ServerProcess,
    inherited_environment,
    start_server,
)
from slipstream.runtime.launch.supervision import Limits, Verdict
from slipstream.runtime.process.environment import LOOPBACK, address_of
from slipstream.transports.credentials import Credentials, stretch


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a job that all of its workers get.

    With an ``address`` other than loopback, all workers run elsewhere (in namespaces): rank 0 then
    listens at ``port`` itself, and the port must be given.
    """

    strategy: str | None = None
    secret: str | None = None
    encrypt: bool | None = None  # None: encrypt between hosts
    address: str = LOOPBACK
    port: int = 0
    interface: str | None = None
    json: Path | None = None
    log: Path | None = None
    tensorboard: Path | None = None
    prometheus: int | None = None
    parts: tuple[str, ...] = ()  # modules of the user's own parts


def launch(
    command: Sequence[str],
    workers: Sequence[Placement],
    *,
    servers: Sequence[Placement] = (),
    settings: Settings | None = None,
    limits: Limits | None = None,
    may_lose: int = 0,
    restarts: int | None = None,
    learners: SharedMemoryUpdates | None = None,
    server_command: Sequence[str] = SERVER_COMMAND,
) -> int:
    """Run ``command`` once per placement; return the exit code of the job.

    Rank 0 uses this process's terminal; lines of other workers are prefixed with their name. If a
    worker fails, the rest are stopped, one line names it, and its code is returned (128 + n for
    signal n). Of the workers after rank 0, ``may_lose`` may fail while the rest continue, and
    ``restarts`` (0) are started again and rejoin the job.

    A script may make its workers learners that share memory, if all of them run on this machine.
    Then rank 0 is one of them, and ``restarts`` is 10 unless it is given. If the command line names
    learners, ``learners`` are their settings, and their directory of checkpoints is locked before
    anything starts.

    All processes that it started have ended when it returns, and also if this process is killed.
    Call it from the main thread: it handles SIGINT, SIGTERM and SIGHUP while it runs.
    """
    settings = settings or Settings()
    secret = settings.secret or secrets.token_hex(32)
    job = secrets.token_hex(16)
    with ExitStack() as last, ExitStack() as stack:
        locks = last.enter_context(DirectoryLocks(log_line))
        if learners is not None and learners.checkpoints is not None:
            locks.take(Path(learners.checkpoints))
        listener = stack.enter_context(_reserve(settings)) if _holds_port(settings) else None
        process_group = stack.enter_context(
            ProcessGroup(limits or Limits(), may_lose=may_lose, restarts=restarts or 0)
        )
        supervisor = LearnerSupervisor(
            process_group, len(workers), RESTARTS if restarts is None else restarts, locks, last
        )
        if learners is not None:
            supervisor.expect_learners()
        shards = _add_servers(process_group, servers, secret, job, settings, server_command)
        if process_group.servers_announced():
            port = listener.getsockname()[1] if listener else settings.port
            env = _job_environment(settings, len(workers), port, secret, job, shards)
            if listener is not None:
                process_group.supervisor = supervisor
            _add_workers(process_group, command, workers, env, listener, supervisor)
            if listener is not None:
                listener.close()
        verdict = process_group.wait()
        supervisor.save_last_checkpoint()
        verdict = supervisor.final_verdict(verdict)
    report(verdict)
    return verdict.code


def _add_servers(
    process_group: ProcessGroup,
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
        shard = start_server(
            index=index,
            credentials=credentials,
            bind=_bind_address(placement, settings),
            placement=placement,
            timeout_s=None,
            command=command,
            parts=settings.parts,
        )
        process_group.add_server(shard)
        shards.append(shard)
    return shards


def _bind_address(placement: Placement, settings: Settings) -> str:
    if settings.interface and settings.address != LOOPBACK:
        return address_of(settings.interface)
    return placement.address or settings.address


def _add_workers(
    process_group: ProcessGroup,
    command: Sequence[str],
    placements: Sequence[Placement],
    env: dict[str, str],
    listener: socket.socket | None,
    supervisor: LearnerSupervisor,
) -> None:
    """Start the workers, on this machine if there is a ``listener``, else on other hosts.

    On this machine rank 0 gets the listener, and each worker a socket to this process; a ``Hello``
    on this socket makes the worker a learner.
    """
    on_host: Counter[str] = Counter()
    shared_by = Counter(placement.address for placement in placements)
    for rank, placement in enumerate(placements):
        own, fds = {"RANK": str(rank), "LOCAL_RANK": str(on_host[placement.address])}, list[int]()
        own["LOCAL_WORLD_SIZE"] = str(shared_by[placement.address])
        on_host[placement.address] += 1
        if rank > 0:
            own["PYTHONUNBUFFERED"] = env.get("PYTHONUNBUFFERED", "1")  # no delayed lines
        with ExitStack() as passed:
            if listener is not None:
                control = passed.enter_context(supervisor.connect(f"rank {rank}"))
                own["SLIPSTREAM_CONTROL_FD"] = str(control.fileno())
                fds.append(control.fileno())
            if listener is not None and rank == 0:
                own["SLIPSTREAM_STORE_FD"] = str(listener.fileno())
                fds.append(listener.fileno())
            process_group.add_worker(
                f"rank {rank}", command, env | own, placement, has_terminal=rank == 0, pass_fds=fds
            )


def _job_environment(
    settings: Settings,
    workers: int,
    port: int,
    secret: str,
    job: str,
    shards: Sequence[ServerProcess],
) -> dict[str, str]:
    """Return the environment variables of all workers of a job."""
    variables = {
        "WORLD_SIZE": workers,
        # Sets of strings have the same order on all ranks, since scripts number classes and words
        # by it.
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED") or "0",
        "MASTER_ADDR": settings.address,
        "MASTER_PORT": port,
        "SLIPSTREAM_JOB": job,
        "SLIPSTREAM_SECRET": secret,
        "SLIPSTREAM_ENCRYPT": None if settings.encrypt is None else int(settings.encrypt),
        "SLIPSTREAM_SERVER_ADDRESSES": ",".join(shard.address for shard in shards) or None,
        "SLIPSTREAM_INTERFACE": settings.interface,
        "SLIPSTREAM_LAUNCHER": os.getpid(),
        "SLIPSTREAM_STRATEGY": settings.strategy,
        "SLIPSTREAM_JSON": settings.json and settings.json.absolute(),
        "SLIPSTREAM_LOG": settings.log and settings.log.absolute(),
        "SLIPSTREAM_TENSORBOARD": settings.tensorboard and settings.tensorboard.absolute(),
        "SLIPSTREAM_PROMETHEUS": settings.prometheus,
        "SLIPSTREAM_PARTS": ",".join(settings.parts) or None,
    }
    env = {"OMP_NUM_THREADS": str(max(1, _cores() // workers))} | inherited_environment()
    return env | {name: str(value) for name, value in variables.items() if value is not None}


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


def _reserve(settings: Settings) -> socket.socket:
    """Return the job's rendezvous socket. It is bound before any worker starts, and rank 0 inherits
    it, so that the system gives the port to no other program in between.

    It does not listen yet: a script may let torch open the store at this port before it calls
    ``slipstream.init``. Torch, too, sets SO_REUSEADDR, so it may bind the port again until then.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.address, settings.port))
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise LaunchError(
            f"port {settings.port} on {settings.address} cannot be used: {reason}; choose another "
            "with --port, or leave it out for a free one"
        ) from error
    return listener


def report(verdict: Verdict) -> None:
    """Print one line, unless the job succeeded."""
    if not verdict.line:
        return
    with contextlib.suppress(OSError):
        if sys.stderr.isatty():
            # A progress bar that was interrupted leaves the cursor hidden, in the middle of a line.
            sys.stderr.write("\x1b[?25h\n")
    log_line(verdict.line)
