"""The database: SQLite in the data directory, or PostgreSQL; a few plain statements for both.

One connection a process, used by one thread at a time. On SQLite a transaction takes the write lock
at once, so that none has to be repeated.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any, Final

from slipstream.errors import ConfigError, RuntimeFault

Row = dict[str, Any]
Connect = Callable[[], Any]  # gives a DB-API connection
PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z_]\w*)")
BUSY_MS: Final = 5_000
PRAGMAS: Final = (
    f"busy_timeout={BUSY_MS}",
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "secure_delete=ON",
)
MIGRATION_LOCK: Final = 7_146_001  # PostgreSQL: only one process migrates at a time


class DatabaseUnavailable(RuntimeFault):
    """The database does not answer now; a repetition may pass."""


class Statements:
    """Runs SQL that both databases understand, with ``:name`` parameters."""

    postgres = False

    def run(self, statement: str, **values: object) -> list[Row]:
        """Run one statement; returns the rows it gives, if it is a query."""
        raise NotImplementedError

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


class Transaction(Statements):
    """Statements on an open connection."""

    def __init__(self, connection: Any, postgres: bool) -> None:
        self._connection = connection
        self.postgres = postgres

    def run(self, statement: str, **values: object) -> list[Row]:
        """Run one statement; returns the rows it gives, if it is a query."""
        cursor = self._connection.execute(
            for_postgres(statement) if self.postgres else statement, values
        )
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()] if names else []


class Database(Statements):
    """A database by its address. A statement outside of ``transaction()`` is one of its own.

    Args:
        address: ``postgresql://…``, or the path of an SQLite file.

    Raises:
        ConfigError: The extra for PostgreSQL is missing.
        DatabaseUnavailable: By each statement, if it is locked, full or gone.

    >>> with Database(":memory:") as database:
    ...     database.migrate()
    ...     database.run("SELECT number FROM schema_version")
    [{'number': 1}, {'number': 2}]
    """

    def __init__(self, address: str) -> None:
        self.postgres = address.startswith(("postgresql://", "postgres://"))
        self._lock = threading.Lock()
        self._connection: Any = None
        self._error, self._connect = _postgres(address) if self.postgres else _sqlite(address)

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, statement: str, **values: object) -> list[Row]:
        """Run one statement; returns the rows it gives, if it is a query."""
        with self.reading() as connected:
            return connected.run(statement, **values)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """All statements of the block take effect together, or none."""
        with self.reading() as transaction:
            transaction.run("BEGIN" if self.postgres else "BEGIN IMMEDIATE")
            try:
                yield transaction
                transaction.run("COMMIT")
            except BaseException:
                with contextlib.suppress(self._error):
                    transaction.run("ROLLBACK")
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[Transaction]:
        """Several queries between which this process changes nothing."""
        with self._lock:
            try:
                self._connection = self._connection or self._connect()
                yield Transaction(self._connection, self.postgres)
            except self._error as error:
                if self.postgres:
                    self._disconnect()
                raise DatabaseUnavailable(f"the database does not answer: {error}") from error

    def migrate(self) -> None:
        """Bring the schema to the newest number, in one transaction.

        Raises:
            ConfigError: The database was written by a later version of slipstream.
        """
        scripts = sorted(
            (file for file in resources.files("slipstream.service").iterdir()),
            key=lambda file: (file.name != "schema.sql", file.name),
        )
        steps = [file.read_text("utf-8") for file in scripts if file.name.endswith(".sql")]
        with self.transaction() as transaction:
            if self.postgres:
                transaction.run("SELECT pg_advisory_xact_lock(:key)", key=MIGRATION_LOCK)
            transaction.run("CREATE TABLE IF NOT EXISTS schema_version (number BIGINT NOT NULL)")
            done = transaction.number("SELECT COALESCE(MAX(number), 0) AS n FROM schema_version")
            if done > len(steps):
                raise ConfigError(
                    f"the database has schema {done}, newer than this version's {len(steps)}; "
                    "use the version of slipstream that wrote it"
                )
            for number, script in enumerate(steps[done:], start=done + 1):
                for statement in statements(script):
                    transaction.run(statement)
                transaction.insert("schema_version", number=number)

    def forget_deleted(self) -> None:
        """Remove what was deleted from SQLite's log, too; best effort."""
        if not self.postgres:
            with contextlib.suppress(DatabaseUnavailable):
                self.run("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connection; the next statement would open it again."""
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(self._error):
                self._connection.close()
            self._connection = None


def _sqlite(address: str) -> tuple[type[Exception], Connect]:
    def connect() -> Any:
        connection = sqlite3.connect(
            address, BUSY_MS / 1000, isolation_level=None, check_same_thread=False
        )
        for pragma in PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        return connection

    return sqlite3.OperationalError, connect


def _postgres(address: str) -> tuple[type[Exception], Connect]:
    try:
        import psycopg
        from psycopg.types.numeric import Int8Dumper
    except ImportError:
        raise ConfigError("PostgreSQL needs psycopg: pip install 'slipstream[postgres]'") from None

    def connect() -> Any:
        connection = psycopg.connect(address, autocommit=True, connect_timeout=5)
        # By default a small number is a smallint, and sums of two overflow.
        connection.adapters.register_dumper(int, Int8Dumper)
        return connection

    return psycopg.OperationalError, connect


def for_postgres(statement: str) -> str:
    """Rewrite ``:name`` to ``%(name)s``.

    >>> for_postgres("SELECT 1 WHERE a = :a AND b::text = :b_2")
    'SELECT 1 WHERE a = %(a)s AND b::text = %(b_2)s'
    """
    return PARAMETER.sub(r"%(\1)s", statement)


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
