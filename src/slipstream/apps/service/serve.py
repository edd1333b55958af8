"""The API process: starts, keeps a trainer, serves, stops in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Final

import msgspec
import uvicorn

from slipstream.apps.service import keys, queue
from slipstream.apps.service.app import LOOPBACK, Gate
from slipstream.apps.service.context import Service
from slipstream.apps.service.data_directory import MODEL, DataDirectory, remove
from slipstream.apps.service.database import Replaced, now_ms
from slipstream.apps.service.deadlines import HEADER_NBYTES, with_limit
from slipstream.apps.service.postgres import shown_address
from slipstream.apps.service.serve_options import SECRET_VARIABLES, ServeOptions, TrainerStart
from slipstream.errors import ConfigError
from slipstream.runtime.launch.processes import Placement, inherited_environment, start_process

LOG = logging.getLogger("slipstream.apps.service")
REQUESTS_STOP_S: Final = 10
TRAINER_STOP_S: Final = 25.0
LONGEST_PAUSE_S: Final = 60.0
POLL_S: Final = 0.1


def prepare(options: ServeOptions) -> Service:
    """Lock the directory and open its database."""
    os.umask(0o077)
    directory = DataDirectory(options.data)
    directory.lock(options.database)
    place = f"process {os.getpid()} on {socket.gethostname()}, data directory {directory.path}"
    file = directory.database_file(options.database)
    is_new = file is not None and not file.exists()
    database = directory.migrated(options.database, place)
    # Also a mistyped --database is a path: it is seen where the service has put its file.
    shown = f"SQLite database {file}" if file else shown_address(options.database)
    LOG.info("data directory %s; %s%s", directory.path, shown, " (new)" if is_new else "")
    return Service(options, directory, database, directory.secret(), keys.RateLimit(options.rate))


def recover(service: Service) -> None:
    """Clear away what a killed service left; ConfigError if anybody could use this one."""
    options, directory, database = service.options, service.directory, service.database
    with database.transaction():
        keys.add_tenant(database, keys.LOCAL, keys.LOCAL)
        open_to_all = options.host not in LOOPBACK and not keys.any_key(database)
        if open_to_all and not options.no_auth:
            raise ConfigError(
                f"{options.host} is not a loopback address, and there is no key: anybody could use "
                "the service. Make one ('slipstream keys add NAME'), or give --no-auth"
            )
        queue.release_all(database, now_ms(), blameless=True)  # no trainer of it lives
        database.run("DELETE FROM purges")
        rows = database.run("SELECT classifier, number FROM versions")
    known = {directory.version(row["classifier"], row["number"]) for row in rows}
    known |= {path.parent for path in known}
    found = [*directory.classifiers.iterdir(), *directory.classifiers.glob("*/*")]
    for path in (*directory.incoming.iterdir(), *(path for path in found if path not in known)):
        remove(path)


class TrainerProcess:
    """The trainer, started again when it dies (after 1, 2, 4 … 60 s)."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._process: subprocess.Popen[bytes] | None = None
        self._beat = time.monotonic()
        service.trainer_silent_s = lambda: time.monotonic() - self._beat

    async def keep(self) -> None:
        """Run it until the service stops; raises Replaced if its database is another's by now."""
        pause_s, stopping = 1.0, self._service.stopping
        while True:
            began = time.monotonic()
            try:
                release, database = queue.release_all, self._service.database
                await asyncio.to_thread(release, database, now_ms(), blameless=False)
                if not stopping.is_set():
                    await self._watch(self._start())
            except Replaced:
                raise
            except Exception as error:
                # Whatever it is (disk, database, no process left) may pass; jobs must not wait on.
                LOG.warning("the trainer cannot be run: %s", error)
                self.end(0)
            if stopping.is_set():
                return
            if time.monotonic() - began > LONGEST_PAUSE_S:
                pause_s = 1.0
            LOG.warning("the trainer died; it starts again in %.0f s", pause_s)
            self._service.restarts += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start it from the main thread: it lives as long as the thread that is its parent.

        Options go through its standard input: every user of the machine may read arguments, and
        the database's address has a password.
        """
        environment = inherited_environment()
        for name in SECRET_VARIABLES:
            environment.pop(name, None)
        self._process = process = start_process(
            [sys.executable, "-P", "-m", "slipstream.apps.service.trainer"],
            environment,
            Placement(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._beat = time.monotonic()
        assert process.stdin is not None
        start = TrainerStart(self._service.options, self._service.database.owner)
        with process.stdin as pipe:
            pipe.write(msgspec.json.encode(start))
        return process

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Read its pulse until it ends."""
        assert process.stdout is not None
        with process.stdout as pulse:
            os.set_blocking(pulse.fileno(), False)
            while process.poll() is None:
                if pulse.read(1024):
                    self._beat = time.monotonic()
                await asyncio.sleep(POLL_S)

    def stop(self) -> None:
        """Ask it to end; its jobs keep their last checkpoint and wait again."""
        if self._process is not None:
            self._process.terminate()

    def end(self, grace_s: float) -> None:
        """Wait until it has ended; kill it, and with it its jobs, if that takes too long."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
            self._process.kill()
            self._process.wait()


def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM; ConfigError if the service cannot start like this.

    Raises Replaced if another service has taken the database while it was away.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with contextlib.closing(prepare(options)) as service:
        recover(service)
        asyncio.run(_serve(service, _listen(options)))


def _listen(options: ServeOptions) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        address = (options.host, options.port)
        listener = socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}; give another --port"
        ) from error
    # asyncio does not set it on these sockets; a small answer would wait 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


async def _serve(service: Service, listener: socket.socket) -> None:
    options = service.options
    config = uvicorn.Config(
        Gate(service),
        http=with_limit(options.connections),
        h11_max_incomplete_event_size=HEADER_NBYTES,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",  # its logger's name, uvicorn.error, makes errors of all it tells
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=65,
        timeout_graceful_shutdown=REQUESTS_STOP_S,
    )
    trainer, server = TrainerProcess(service), uvicorn.Server(config)
    # Its own handler would end the process by the signal, once all is done.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]

    def stop() -> None:
        if service.stopping.is_set():
            return
        LOG.info("stopping")
        service.stopping.set()
        trainer.stop()
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    keeping = asyncio.create_task(trainer.keep())
    keeping.add_done_callback(lambda _: stop())  # also if the database is another service's
    host = f"[{options.host}]" if ":" in options.host else options.host
    LOG.info("ready at http://%s:%d", host, listener.getsockname()[1])
    await server.serve(sockets=[listener])
    stop()  # it may have ended by itself
    await asyncio.to_thread(trainer.end, TRAINER_STOP_S)
    await keeping


def check(options: ServeOptions) -> list[str]:
    """What is wrong with a service that does not run. Nothing is removed.

    SQLite's log is put into its file, so that the directory may be copied afterwards.
    """
    with contextlib.closing(prepare(options)) as service:
        rows = service.database.run("SELECT id, active FROM classifiers WHERE active IS NOT NULL")
        paths = [service.directory.version(row["id"], row["active"]) / MODEL for row in rows]
        damages = {path: service.models.damage(path) for path in paths}
        service.database.forget_deleted()
        return [f"{path}: {damage}" for path, damage in damages.items() if damage is not None]
