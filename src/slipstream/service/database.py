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
TABLES: Final = "SELECT name FROM sqlite_master WHERE type = 'table'"
OURS: Final = frozenset({"schema_version", "tenants", "classifiers", "jobs"})


class DatabaseUnavailable(RuntimeFault):
    """The database does not answer now; a repetition may pass."""


class Database:
    """A database by its address: SQL that both understand, with ``:name`` parameters.

    Threads take turns. Statements of a thread that is in ``transaction()`` are part of it; others
    are transactions of their own. Each raises DatabaseUnavailable if the database is locked, full
    or gone; the first one, ConfigError if another program has written the SQLite file.

    >>> with Database(":memory:") as database:
    ...     database.migrate()
    ...     database.run("SELECT number FROM schema_version")
    [{'number': 1}, {'number': 2}, {'number': 3}]
    """

    def __init__(self, address: str) -> None:
        self.postgres = address.startswith(("postgresql://", "postgres://"))
        self._lock = threading.RLock()
        self._connection: Any = None
        self._error, self._connect = _postgres(address) if self.postgres else _sqlite(address)

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
                self._connection = self._connection or self._connect()
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

    def migrate(self, check: Callable[[int], None] = lambda schema: None) -> None:
        """Bring the schema to the newest number, in one transaction; a later one is refused.

        Args:
            check: Called first, with the schema's number (0: a new database). Nothing is changed
                if it raises.
        """
        folder = resources.files("slipstream.service")
        names = sorted(file.name for file in folder.iterdir() if file.name.startswith("migration_"))
        steps = [(folder / name).read_text("utf-8") for name in ("schema.sql", *names)]
        with self.transaction():
            if self.postgres:
                self.run("SELECT pg_advisory_xact_lock(:key)", key=MIGRATION_LOCK)
            self.run("CREATE TABLE IF NOT EXISTS schema_version (number BIGINT NOT NULL)")
            done = self.number("SELECT COALESCE(MAX(number), 0) AS n FROM schema_version")
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
