"""What an address of PostgreSQL becomes: settings of a connection, or an error without a secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.apps.service.data_directory import DataDirectory
from slipstream.apps.service.database import Database, DatabaseUnavailable
from slipstream.apps.service.postgres import shown_address
from slipstream.errors import ConfigError

psycopg = pytest.importorskip("psycopg")
SELECT = "SELECT 1"


@pytest.mark.parametrize("password", ["begin@secret", "secret/end", "x:secret/end", "%secret"])
def test_no_part_of_a_password_is_shown(password: str) -> None:
    """libpq takes the part of it for a host or a port, and names that in its own error."""
    database = Database(f"postgresql://user:{password}@localhost:1/name")
    with pytest.raises(ConfigError, match="address of the database is malformed") as refused:
        database.run(SELECT)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["postgresql+psycopg://", "POSTGRESQL://", "postgresql:/"])
def test_an_address_of_another_kind_is_no_path(tmp_path: Path, scheme: str) -> None:
    with pytest.raises(ConfigError, match="give postgresql://") as refused:
        DataDirectory(str(tmp_path)).lock(f"{scheme}user:secret@localhost/name")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "begin"),
    [
        ("mysql://u:p@h/x", "mysql://;"),
        ("mysql:/u:p@h/x", "mysql:/;"),
        ("postgresql+psycopg://u:p@h/x", "postgresql+psycopg://;"),
    ],
)
def test_how_an_address_of_another_kind_begins_is_shown(address: str, begin: str) -> None:
    with pytest.raises(ConfigError, match="begins with") as refused:
        Database(address)
    assert f"begins with {begin}" in str(refused.value)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://me:secret@db/nlc", "PostgreSQL database nlc at db"),
        ("postgres://me@db:5433/nlc?password=secret", "PostgreSQL database nlc at db:5433"),
        ("postgresql://", "PostgreSQL database of the default name"),
    ],
)
def test_address_is_shown_without_its_password(address: str, shown: str) -> None:
    assert shown_address(address) == shown


@pytest.mark.parametrize(
    ("asked", "timeout"), [("", "25000"), ("&tcp_user_timeout=0&host=@socket", "0")]
)
def test_a_server_that_is_gone_is_noticed(
    monkeypatch: pytest.MonkeyPatch, asked: str, timeout: str
) -> None:
    """Else a request waits until the kernel gives up, and holds the lock of all others."""
    given: dict[str, Any] = {}

    def connect(**settings: Any) -> None:
        given.update(settings)
        raise psycopg.OperationalError("away")

    monkeypatch.setattr(psycopg, "connect", connect)
    with pytest.raises(DatabaseUnavailable, match="away"):
        Database(f"postgresql://user:word@/name?port=5432{asked}").run(SELECT)
    assert str(given["tcp_user_timeout"]) == timeout
    assert int(given["keepalives_idle"]) <= 10
    assert (given["user"], given["password"], given["dbname"]) == ("user", "word", "name")
