"""A data directory that cannot be used, and files of other programs: refused, not changed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from slipstream.apps.service import keys
from slipstream.apps.service.data_directory import MODEL, DataDirectory
from slipstream.errors import ConfigError


def write_notes(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.executescript("CREATE TABLE notes (a TEXT); CREATE TABLE schema_version (b TEXT)")


def write_text(path: Path) -> None:
    path.write_text("these are notes of another program\n" * 100)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (write_notes, "is the database of another program, with the table 'notes'"),
        (write_text, "is not an SQLite database"),
    ],
)
def test_a_file_of_another_program(tmp_path: Path, write, said: str) -> None:
    path = tmp_path / "service.db"
    write(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError) as refused:
        DataDirectory(str(tmp_path)).migrated("")
    assert str(refused.value) == (
        f"{path} {said}; move it away, or give another --data or --database"
    )
    assert path.read_bytes() == before


def test_a_directory_that_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match=r"cannot use the data directory .*; give one that"):
        DataDirectory(str(tmp_path)).lock()


def test_the_database_of_another_directory(tmp_path: Path) -> None:
    """A start would remove all models here."""
    other = str(tmp_path / "other.db")
    for name in ("a", "b"):
        folder = DataDirectory(str(tmp_path / name))
        with folder.migrated(other if name == "a" else "") as database:
            keys.add_tenant(database, keys.LOCAL, keys.LOCAL)
            row = {"id": name, "tenant": keys.LOCAL, "language": "en", "created": 1, "serial": 1}
            database.insert("classifiers", **row)
        (folder.classifiers / name).mkdir()
    folder.migrated("").close()
    with closing(sqlite3.connect(other)) as database:  # as an earlier version left it
        database.execute("DELETE FROM schema_version WHERE number > 1")
        database.commit()
    with pytest.raises(ConfigError, match=r"does not know the directory .*; was --database"):
        folder.migrated(other)
    with closing(sqlite3.connect(other)) as database:
        assert database.execute("SELECT number FROM schema_version").fetchall() == [(1,)]


def test_a_database_without_classifiers(tmp_path: Path) -> None:
    """Files that have no row are removed, unless there are models, which only a delete leaves."""
    folder = DataDirectory(str(tmp_path))
    folder.migrated("").close()
    (folder.classifiers / "uploaded" / "1").mkdir(parents=True)  # its create was killed
    folder.migrated("").close()
    model = folder.classifiers / "trained" / "1" / MODEL
    model.parent.mkdir(parents=True)
    model.touch()
    with pytest.raises(ConfigError, match=r"does not know the directory .*; was --database"):
        folder.migrated("")
    with folder.database("") as database:
        database.insert("purges", path="trained", at=1)  # its delete was killed
    folder.migrated("").close()
