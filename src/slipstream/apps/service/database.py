"""The database: SQLite in the data directory, or PostgreSQL; a few plain statements for both.

One connection a process, used by one thread at a time. On SQLite a transaction takes the write lock
at once, so that none has to be repeated.

A PostgreSQL database belongs to one service at a time, whichever machine that is on. Each of its
connections shares an advisory lock, and a row names the service. A start needs the lock alone,
which no one gets while another service has a connection; then it writes the row. A connection that
was lost and comes back shares the lock again, and only then reads the row. So no other service has
started before anything that a connection writes. Locks end with their session: also if a process is
killed, and all of them if the server restarts. (SQLite: see ``DataDirectory.lock``.)
"""

from __future__ import annotations

import contextlib
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any, Final

from slipstream.apps.service.postgres import postgres
from slipstream.errors import ConfigError, RuntimeFault

Row = dict[str, Any]
Connect = Callable[[], Any]  # gives a DB-API connection
PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z_]\w*)")
URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://?")  # C:/ is a path
BUSY_MS: Final = 5_000
PRAGMAS: Final = (
    f"busy_timeout={BUSY_MS}",
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "secure_delete=ON",
)
MIGRATION_LOCK: Final = 7_146_001  # PostgreSQL: only one process migrates at a time
SERVICE_LOCK: Final = "7146002, hashtext(current_schema())"  # PostgreSQL
TAKEOVER_S: Final = 5.0  # until the server has noticed that a killed service is gone
# The server ends sessions of a machine that is gone after 25 s, not after two hours.
NOTICE_LOSS: Final = """
SELECT set_config('tcp_keepalives_idle', '10', false),
  set_config('tcp_keepalives_interval', '5', false),
  set_config('tcp_keepalives_count', '3', false)
"""
POLL_S: Final = 0.1
TABLES: Final = "SELECT name FROM sqlite_master WHERE type = 'table'"
OWNER_SCHEMA: Final = 4  # from which on there is a table of the owner
OURS: Final = frozenset({"schema_version", "tenants", "classifiers", "jobs"})


class DatabaseUnavailable(RuntimeFault):
    """The database does not answer now; a repetition may pass."""


class Replaced(DatabaseUnavailable):
    """Another service has taken the database over while this one had no connection; it must end."""


class Database:
    """A database by its address: SQL that both understand, with ``:name`` parameters.

    Threads take turns. Statements of a thread that is in ``transaction()`` are part of it; others
    are transactions of their own. Each raises DatabaseUnavailable if the database is locked, full
    or gone; the first one, ConfigError if another program has written the SQLite file.

    >>> with Database(":memory:") as database:
    ...     database.migrate()
    ...     database.run("SELECT number FROM schema_version")
    [{'number': 1}, {'number': 2}, {'number': 3}, {'number': 4}]

    Args:
        address: postgresql://…, or the path of an SQLite file.
        owner: The service that uses it; another process of it has called ``migrate``. Without one,
            connections do not count as a service's.
    """

    def __init__(self, address: str, owner: str = "") -> None:
        self.owner = owner
        self.postgres = is_postgres(address)
        self._lock = threading.RLock()
        self._connection: Any = None
        self._error, self._connect = postgres(address) if self.postgres else _sqlite(address)

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, statement: str, **values: object) -> list[Row]:
        """Run one statement; returns the rows it gives, if it is a query."""
        if self.postgres:
            statement = PARAMETER.sub(r"%(\1)s", statement)
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                    self._share_lock()
                cursor = self._connection.execute(statement, values)
                names = [column[0] for column in cursor.description or ()]
                rows = cursor.fetchall() if names else []
            except self._error as error:
                if self.postgres:
                    self.close()
                raise DatabaseUnavailable(f"the database does not answer: {error}") from error
        return [dict(zip(names, row, strict=True)) for row in rows]

    def one(self, statement: str, **values: object) -> Row | None:
        """The first row of a query, or None."""
        return next(iter(self.run(statement, **values)), None)

    def number(self, statement: str, **values: object) -> int:
        """The number ``n`` that a query gives."""
        return int(self.run(statement, **values)[0]["n"])

    def insert(self, table: str, **values: object) -> None:
        """Insert a row."""
        places = ", ".join(f":{name}" for name in values)
        self.run(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({places})", **values)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Database]:
        """Several queries between which no other thread changes anything."""
        with self._lock:
            yield self

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Database]:
        """All statements of the block take effect together, or none."""
        with self._lock:
            self.run("BEGIN" if self.postgres else "BEGIN IMMEDIATE")
            try:
                yield self
                self.run("COMMIT")
            except BaseException:
                with contextlib.suppress(DatabaseUnavailable):
                    self.run("ROLLBACK")
                raise

    def _share_lock(self) -> None:
        """Make a new connection one of the service's; Replaced if there is another service."""
        if not (self.postgres and self.owner):
            return
        self.run(NOTICE_LOSS)
        try:
            if not self.run(f"SELECT pg_try_advisory_lock_shared({SERVICE_LOCK}) AS held")[0][
                "held"
            ]:
                raise DatabaseUnavailable("another service is starting on the database")
            row = self.one("SELECT id, place FROM service_owner")
            if row is None or row["id"] != self.owner:
                by = "" if row is None else f": {row['place']}"
                raise Replaced(
                    f"another service uses the database by now{by}; stop that one, or give one of "
                    "them another --database"
                )
        except BaseException:
            self.close()
            raise

    def _take_lock(self, schema: int) -> None:
        """Lock out every service for this transaction; ConfigError if one has a connection."""
        until = time.monotonic() + TAKEOVER_S
        take = f"SELECT pg_try_advisory_xact_lock({SERVICE_LOCK}) AS held"
        while not self.run(take)[0]["held"]:
            if time.monotonic() > until:
                known = (
                    self.one("SELECT place FROM service_owner") if schema >= OWNER_SCHEMA else None
                )
                by = f" ({known['place']})" if known else ""
                raise ConfigError(
                    f"another service{by} uses this database; stop it, or give another --database"
                )
            time.sleep(POLL_S)

    def migrate(self, check: Callable[[int], None] = lambda schema: None, place: str = "") -> None:
        """Bring the schema to the newest number, in one transaction; a later one is refused.

        Args:
            check: Called first, with the schema's number (0: a new database). Nothing is changed
                if it raises.
            place: Of a service, which the database then belongs to; ConfigError if another one has
                a connection.
        """
        takes = bool(place and self.postgres)
        owner = secrets.token_hex(8)
        folder = resources.files("slipstream.apps.service")
        names = sorted(file.name for file in folder.iterdir() if file.name.startswith("migration_"))
        steps = [(folder / name).read_text("utf-8") for name in ("schema.sql", *names)]
        with self.transaction():
            if self.postgres:
                self.run("SELECT pg_advisory_xact_lock(:key)", key=MIGRATION_LOCK)
            self.run("CREATE TABLE IF NOT EXISTS schema_version (number BIGINT NOT NULL)")
            done = self.number("SELECT COALESCE(MAX(number), 0) AS n FROM schema_version")
            if takes:
                self._take_lock(done)
            check(done)
            if done > len(steps):
                raise ConfigError(
                    f"the database has schema {done}, newer than this version's {len(steps)}; "
                    "use the version of slipstream that wrote it"
                )
            for number, script in enumerate(steps[done:], start=done + 1):
                for statement in statements(script):
                    self.run(statement)
                self.insert("schema_version", number=number)
            if takes:
                self.run("DELETE FROM service_owner")
                self.insert("service_owner", id=owner, place=place)
                # The lock of the transaction ends with it; that of the session stays.
                self.run(NOTICE_LOSS)
                self.run(f"SELECT pg_advisory_lock_shared({SERVICE_LOCK})")
        if takes:
            self.owner = owner

    def forget_deleted(self) -> None:
        """Remove what was deleted from SQLite's log, too; best effort."""
        if not self.postgres:
            with contextlib.suppress(DatabaseUnavailable):
                self.run("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connection; the next statement would open it again."""
        with self._lock, contextlib.suppress(self._error):
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()


def is_postgres(address: str) -> bool:
    """Whether an address is one of PostgreSQL; else it is the path of an SQLite file.

    Raises:
        ConfigError: It is an address of another kind. Taken for a path, it would be shown in
            errors with its password.
    """
    if address.startswith(("postgresql://", "postgres://")):
        return True
    if URL.match(address):
        raise ConfigError(
            f"the address of the database begins with {URL.findall(address)[0]}; give "
            "postgresql://USER:PASSWORD@HOST/NAME, or the path of an SQLite file"
        )
    return False


def _sqlite(address: str) -> tuple[type[Exception], Connect]:
    def connect() -> Any:
        connection = sqlite3.connect(
            address, BUSY_MS / 1000, isolation_level=None, check_same_thread=False
        )
        try:
            _refuse_foreign(connection, address)  # before a pragma changes the file
            for pragma in PRAGMAS:
                connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            connection.close()
            raise
        return connection

    return sqlite3.OperationalError, connect


def _refuse_foreign(connection: sqlite3.Connection, address: str) -> None:
    """Raise ConfigError if an SQLite file is no database, or one of another program."""
    try:
        tables = {name for (name,) in connection.execute(TABLES)}
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_NOTADB:
            raise
        found = "is not an SQLite database"
    else:
        if not tables or tables >= OURS:
            return
        found = f"is the database of another program, with the table {min(tables)!r}"
    raise ConfigError(f"{address} {found}; move it away, or give another --data or --database")


def statements(script: str) -> list[str]:
    """The statements of a script.

    >>> statements("-- why\\nCREATE TABLE a (b TEXT);\\nDROP TABLE a;\\n")
    ['CREATE TABLE a (b TEXT)', 'DROP TABLE a']
    """
    lines = [line for line in script.splitlines() if not line.startswith("--")]
    return [part.strip() for part in "\n".join(lines).split(";") if part.strip()]


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
