"""One service a database: a second one is refused, and a connection that comes back is checked."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.apps.service import database as databases
from slipstream.apps.service import keys
from slipstream.apps.service.data_directory import DataDirectory
from slipstream.apps.service.database import Database, DatabaseUnavailable, Replaced
from slipstream.apps.service.serve import prepare
from slipstream.apps.service.serve_options import ServeOptions
from slipstream.errors import ConfigError

TENANTS = "SELECT COUNT(*) AS n FROM tenants"


@pytest.fixture
def address(postgres: str) -> Iterator[str]:
    with new_schema(postgres) as address:
        yield address


@contextlib.contextmanager
def refused(match: str) -> Iterator[None]:
    """A start is refused, without the wait for the end of a service that was killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(databases, "TAKEOVER_S", 0.0)
        with pytest.raises(ConfigError, match=match):
            yield


@contextlib.contextmanager
def new_schema(postgres: str) -> Iterator[str]:
    """The address of a schema of its own, which has services of its own."""
    schema = f"test_{secrets.token_hex(4)}"
    with Database(postgres) as admin:
        admin.run(f"CREATE SCHEMA {schema}")
        yield f"{postgres}{'&' if '?' in postgres else '?'}options=-csearch_path%3D{schema}"
        admin.run(f"DROP SCHEMA {schema} CASCADE")


def start(address: str, place: str) -> Database:
    """What a service does with its database when it starts."""
    database = Database(address)
    try:
        database.migrate(place=place)
    except BaseException:
        database.close()
        raise
    return database


def cut(postgres: str, service: Database) -> None:
    """End its connection at the server, as a restart of it or a network does."""
    number = service.number("SELECT pg_backend_pid() AS n")
    with Database(postgres) as admin:
        # It waits for the end.
        assert admin.run("SELECT pg_terminate_backend(:number::int, 60000) AS done", number=number)
    with pytest.raises(DatabaseUnavailable):
        service.run(TENANTS)


def test_a_second_service_is_refused(address: str, tmp_path: Path) -> None:
    first, second, third = (
        ServeOptions(data=str(tmp_path / name), database=address) for name in ("first", "2", "3")
    )
    with contextlib.closing(prepare(first)) as service:
        keys.add_tenant(service.database, keys.LOCAL, keys.LOCAL)
        with refused(r"another service \(process \d+ on .*first\) uses"):
            prepare(second)
        with DataDirectory(first.data).migrated(address) as other:  # as 'slipstream keys' does
            keys.add_key(other, "team")
        assert service.database.number(TENANTS) == 2
    prepare(third).close()


def test_a_service_of_another_schema_is_another_database(address: str, postgres: str) -> None:
    with start(address, "one"), new_schema(postgres) as other:
        start(other, "two").close()


def test_a_process_of_the_service_that_is_left_keeps_others_out(address: str) -> None:
    with start(address, "one") as service:
        trainer = Database(address, service.owner)
        assert trainer.number(TENANTS) == 0
    with trainer, refused(r"\(one\) uses this database"):
        start(address, "other")
    start(address, "other").close()


def test_a_connection_that_comes_back_keeps_others_out(address: str, postgres: str) -> None:
    with start(address, "one") as service:
        cut(postgres, service)
        keys.add_tenant(service, "a", "a")  # nobody came in between
        with refused(r"\(one\) uses this database"):
            start(address, "other")


def test_a_service_that_was_replaced_meanwhile_writes_nothing(address: str, postgres: str) -> None:
    with start(address, "one") as service:
        cut(postgres, service)
        with start(address, "two") as other:
            for database in (service, Database(address, service.owner)):
                with pytest.raises(Replaced, match="another service uses the database by now: two"):
                    keys.add_tenant(database, "a", "a")
            assert other.number(TENANTS) == 0
        with pytest.raises(Replaced):  # also when the other one has ended
            keys.add_tenant(service, "a", "a")


def test_while_another_service_starts_a_connection_does_not_come_back(
    address: str, postgres: str
) -> None:
    with start(address, "one") as service, Database(address) as other:
        cut(postgres, service)

        def check(schema: int) -> None:
            with pytest.raises(DatabaseUnavailable, match="another service is starting"):
                service.run(TENANTS)
            raise ConfigError("refused")

        with pytest.raises(ConfigError, match="refused"):
            other.migrate(check, "two")
        assert service.number(TENANTS) == 0  # the other one did not start after all


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("shared.db", "shared.db"),
        ("shared.db", "link.db"),
        ("", "first/service.db"),  # the first one's own file
    ],
)
def test_an_sqlite_file_of_two_directories(tmp_path: Path, one: str, other: str) -> None:
    (tmp_path / "link.db").symlink_to("shared.db")
    first, second = (
        ServeOptions(data=str(tmp_path / name), database=file and str(tmp_path / file))
        for name, file in (("first", one), ("second", other))
    )
    said = r"another service \(process \d+\) uses the database"
    with contextlib.closing(prepare(first)), pytest.raises(ConfigError, match=said):
        prepare(second)


def test_an_sqlite_file_in_no_folder(tmp_path: Path) -> None:
    """It is not the data directory that cannot be used."""
    absent = ServeOptions(data=str(tmp_path / "data"), database=str(tmp_path / "absent" / "a.db"))
    with pytest.raises(ConfigError, match=r"the database .*a\.db: .* \(--database\)"):
        prepare(absent)


def test_the_database_of_a_directory_that_is_elsewhere(tmp_path: Path) -> None:
    """A start with another directory would take its jobs, and find no data."""
    address = str(tmp_path / "shared.db")
    with DataDirectory(str(tmp_path / "first")).migrated(address) as database:
        keys.add_tenant(database, keys.LOCAL, keys.LOCAL)
        row = {"id": "a", "tenant": keys.LOCAL, "language": "en", "created": 1, "serial": 1}
        database.insert("classifiers", **row)
    with pytest.raises(ConfigError, match=r"classifiers of another directory than .*second; was"):
        DataDirectory(str(tmp_path / "second")).migrated(address)
