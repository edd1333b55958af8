"""The data directory: who may use it, where files lie, what is removed.

The database decides. Names on disk are ids of ours; nothing a user wrote becomes a path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from pathlib import Path

from slipstream.apps.service.database import Database, is_postgres
from slipstream.errors import ConfigError
from slipstream.runtime.files.whole_files import read_own, replace_file

MODEL = "model.safetensors"


class DataDirectory:
    """The files of a service; created if necessary, for this user alone."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        self.incoming = self.path / "incoming"  # uploads under way
        self.classifiers = self.path / "classifiers"
        self.own_database = self.path / "service.db"
        try:
            for folder in (self.path, self.incoming, self.classifiers):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _make_private(folder, 0o700)
            _make_private(self.own_database, 0o600)
        except OSError as error:
            raise _unusable(f"the data directory {self.path}", "--data", error) from error

    def version(self, classifier: str, number: int) -> Path:
        """The files of one version."""
        return self.classifiers / classifier / str(number)

    def database(self, address: str, owner: str = "") -> Database:
        """The database at an address; by default SQLite in the directory."""
        return Database(address or str(self.own_database), owner)

    def migrated(self, address: str, place: str = "") -> Database:
        """The database, with the newest schema; ConfigError if it is that of another directory.

        A start removes files that have no row; with the wrong database, that is all of them. With a
        ``place`` the database belongs to the service there; ConfigError if it is another's.
        """
        database = self.database(address)
        try:
            database.migrate(lambda schema: self._refuse_unknown(database, schema), place)
        except BaseException:
            database.close()
            raise
        return database

    def _refuse_unknown(self, database: Database, schema: int) -> None:
        """Raise ConfigError if a database knows none of the classifiers here.

        If it knows no classifier at all, only models count: a create that was killed leaves a
        directory without a model, a delete one that is to be purged. If it knows some, and none is
        here, it is the database of another directory, whose jobs a start would take.
        """
        found = {path.name for path in self.classifiers.iterdir()}
        ids = database.run("SELECT id FROM classifiers") if schema else []
        known = {row["id"] for row in ids}
        if found & known:
            return
        if known and not found:
            raise ConfigError(
                f"this database has the classifiers of another directory than {self.path}; was "
                "--data forgotten?"
            )
        if schema and not known:
            trained = {path.parent.parent.name for path in self.classifiers.glob(f"*/*/{MODEL}")}
            found = trained - {row["path"] for row in database.run("SELECT path FROM purges")}
        if found:
            raise ConfigError(
                f"this database does not know the directory {self.path}; was --database forgotten?"
            )

    def lock(self, address: str = "") -> None:
        """Make this process the only service of the directory, and of its SQLite file.

        That holds until the process ends. Services of two directories may name one file, which is
        in one of them or elsewhere, and may have several names.
        """
        _lock(self.path / "lock", f"the data directory {self.path}", "--data")
        if not is_postgres(address):
            file = Path(address or self.own_database).resolve()
            _lock(Path(f"{file}.lock"), f"the database {file}", "--database")

    def database_file(self, address: str) -> Path | None:
        """The SQLite file that an address names; None if it is one of PostgreSQL."""
        return None if is_postgres(address) else Path(address or self.own_database).absolute()

    def secret(self) -> bytes:
        """The key that signs tokens; made on first use."""
        path = self.path / "secret"
        if not path.exists():
            replace_file(path, [secrets.token_bytes(32)])
            path.chmod(0o600)
        return read_own(path, 1024)

    def free_nbytes(self) -> int:
        """What is free on its disk."""
        return shutil.disk_usage(self.path).free


def _lock(path: Path, what: str, option: str) -> None:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        owner = os.pread(file, 32, 0).decode("ascii", "replace").strip() or "?"
        os.close(file)
        raise ConfigError(
            f"another service (process {owner}) uses {what}; stop it, or give another one "
            f"({option})"
        ) from None
    except OSError as error:
        raise _unusable(what, option, error) from error


def _unusable(what: str, option: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot use {what}: {error.strerror}; give one that this user may write to ({option})"
    )


def _make_private(path: Path, mode: int) -> None:
    """Take a path from other users. It may be another owner's, shared as /tmp is, or not yet made.

    The directory may have been made by hand; the database, before any service ran.
    """
    with contextlib.suppress(PermissionError, FileNotFoundError):
        if not path.stat().st_mode & stat.S_ISVTX:
            path.chmod(mode)


def remove(path: Path) -> None:
    """Remove a file, or a directory with all that is in it; gone already is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
