"""The database: SQLite in the data directory, or PostgreSQL; a few plain statements for both.

One connection a process, used by one thread at a time. Every write is inside ``transaction()``; on
SQLite that takes the write lock at once, so that no transaction has to be repeated.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import ConfigError, RuntimeFault

Row = dict[str, Any]
PARAMETER = re.compile(r"(?<![:\w]):([a-z_]\w*)")
BUSY_MS = 5_000
RUSH_LOCK = 7_146_001  # PostgreSQL: only one process migrates at a time


class DatabaseUnavailable(RuntimeFault):
    """The database does not answer now; a repetition may pass."""


class Connection(Protocol):
    """What of a DB-API connection is used."""

    def execute(self, statement: str, values: Any = ..., /) -> Any: ...
    def close(self) -> None: ...


class Transaction:
    """Runs statements: ``:name`` parameters, rows as dictionaries."""

    def __init__(self, connection: Connection, postgres: bool) -> None:
        self._connection = connection
        self.postgres = postgres

    def run(self, statement: str, values: Mapping[str, object] | None = None) -> list[Row]:
        """Run one statement.

        Args:
            statement: SQL that both databases understand.
            values: The parameters by name.

        Returns:
            The rows it gives; none if it is no query.
        """
        if self.postgres:
            statement = for_postgres(statement)
        cursor = self._connection.execute(statement, dict(values or {}))
        if cursor.description is None:
            return []
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def one(self, statement: str, values: Mapping[str, object] | None = None) -> Row | None:
        """The first row of a statement, or None."""
        rows = self.run(statement, values)
        return rows[0] if rows else None


def for_postgres(statement: str) -> str:
    """Rewrite ``:name`` to ``%(name)s``.

    >>> for_postgres("SELECT 1 WHERE a = :a AND b::text = :b_2")
    'SELECT 1 WHERE a = %(a)s AND b::text = %(b_2)s'
    """
    return PARAMETER.sub(r"%(\1)s", statement)


class Database:
    """A database by its address.

    Args:
        address: ``postgresql://…``, or the path of an SQLite file.

    Raises:
        ConfigError: The extra for PostgreSQL is missing.

    >>> with Database(":memory:") as database:
    ...     database.migrate()
    ...     with database.transaction() as transaction:
    ...         transaction.one("SELECT number FROM schema_version")
    {'number': 1}
    """

    def __init__(self, address: str) -> None:
        self.postgres = address.startswith(("postgresql://", "postgres://"))
        self._address = address
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._errors, self._open = _postgres(address) if self.postgres else _sqlite(address)

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """All statements of the block take effect together, or none.

        Raises:
            DatabaseUnavailable: It is locked, full or gone; a repetition may pass.
        """
        with self._lock:
            try:
                connection = self._connected()
                connection.execute("BEGIN" if self.postgres else "BEGIN IMMEDIATE")
                try:
                    yield Transaction(connection, self.postgres)
                    connection.execute("COMMIT")
                except BaseException:
                    with contextlib.suppress(*self._errors):
                        connection.execute("ROLLBACK")
                    raise
            except self._errors as error:
                if self.postgres:
                    self._disconnect()
                raise DatabaseUnavailable(f"the database does not answer: {error}") from error

    @contextlib.contextmanager
    def reading(self) -> Iterator[Transaction]:
        """For one query, or several that need not agree.

        Raises:
            DatabaseUnavailable: It does not answer; a repetition may pass.
        """
        with self._lock:
            try:
                yield Transaction(self._connected(), self.postgres)
            except self._errors as error:
                if self.postgres:
                    self._disconnect()
                raise DatabaseUnavailable(f"the database does not answer: {error}") from error

    def migrate(self) -> None:
        """Bring the schema to the newest number, in one transaction.

        Raises:
            ConfigError: The database was written by a later version of slipstream.
        """
        steps = migrations()
        with self.transaction() as transaction:
            if self.postgres:
                transaction.run("SELECT pg_advisory_xact_lock(:key)", {"key": RUSH_LOCK})
            transaction.run("CREATE TABLE IF NOT EXISTS schema_version (number BIGINT NOT NULL)")
            row = transaction.one("SELECT MAX(number) AS number FROM schema_version")
            done = (row or {}).get("number") or 0
            if done > len(steps):
                raise ConfigError(
                    f"the database has schema {done}, newer than this version's {len(steps)}; "
                    "use the version of slipstream that wrote it"
                )
            for number, script in enumerate(steps[done:], start=done + 1):
                for statement in statements(script):
                    transaction.run(statement)
                transaction.run("INSERT INTO schema_version VALUES (:number)", {"number": number})

    def forget_deleted(self) -> None:
        """Remove what was deleted from SQLite's log, too; best effort."""
        if not self.postgres:
            with contextlib.suppress(DatabaseUnavailable), self.reading() as reading:
                reading.run("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connection; the next statement would open it again."""
        with self._lock:
            self._disconnect()

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(*self._errors):
                self._connection.close()
            self._connection = None


def _sqlite(address: str) -> tuple[tuple[type[Exception], ...], Callable[[], Connection]]:
    def connect() -> Connection:
        connection = sqlite3.connect(
            address, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False
        )
        for pragma in (
            f"busy_timeout={BUSY_MS}",
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            "secure_delete=ON",
        ):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    return (sqlite3.OperationalError,), connect


def _postgres(address: str) -> tuple[tuple[type[Exception], ...], Callable[[], Connection]]:
    try:
        import psycopg
        from psycopg.types.numeric import Int8Dumper
    except ImportError:
        raise ConfigError("PostgreSQL needs psycopg: pip install 'slipstream[postgres]'") from None

    def connect() -> Connection:
        connection = psycopg.connect(address, autocommit=True, connect_timeout=5)
        # By default a small number is a smallint, and sums of two overflow.
        connection.adapters.register_dumper(int, Int8Dumper)
        return connection

    return (psycopg.OperationalError,), connect


def migrations() -> list[str]:
    """The scripts, in order: ``schema.sql``, then ``migration_002.sql`` and so on."""
    folder = resources.files("slipstream.service")
    names = sorted(
        entry.name
        for entry in folder.iterdir()
        if re.fullmatch(r"migration_\d{3}\.sql", entry.name)
    )
    return [(folder / name).read_text("utf-8") for name in ["schema.sql", *names]]


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


def sqlite_path(directory: Path) -> str:
    """Where SQLite keeps the service's database."""
    return str(directory / "service.db")
