"""A PostgreSQL server of the tests: a temporary directory, its own socket, no system service."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

LIMIT_S = 180
USERS = ("postgres", "nobody")  # it refuses to run as root


def find_binaries() -> Path | None:
    """Where its programs are; Debian keeps them away from the path."""
    found = shutil.which("postgres")
    places = [Path(found).resolve().parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "initdb").exists()), None)


class PostgresServer:
    """Runs from ``start()`` to ``stop()``, as often as one likes; ``close()`` removes its data."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._user = _unprivileged()
        self._folder = Path(tempfile.mkdtemp(prefix="slipstream-postgres-"))
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        self._process: subprocess.Popen[bytes] | None = None
        made = self._start("initdb", "-U", "tests", "-A", "trust", "--no-sync")
        assert made.wait(LIMIT_S) == 0, self._log.read_text()

    @property
    def address(self) -> str:
        return f"postgresql://tests@/postgres?host={self._folder}"

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        settings = ("-c", "listen_addresses=", "-k", str(self._folder), "-F")
        self._process = self._start("postgres", *settings)
        until = time.monotonic() + LIMIT_S
        ready = [self._binaries / "pg_isready", "-q", "-h", self._folder]
        while subprocess.run(ready, check=False).returncode:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < until, self._log.read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop it at once, with every connection to it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(LIMIT_S)
            self._process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        # It ends with the tests, whatever ends them.
        with_us = ("setpriv", "--pdeathsig", "INT")
        command = (*with_us, self._binaries / program, "-D", self._folder / "data", *arguments)
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                user=self._user,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests
            )


def _unprivileged() -> str | None:
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(user for user in USERS if user in known)
