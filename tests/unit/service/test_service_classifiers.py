"""Versions and jobs of classifiers in the database and on disk, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.apps.service import app, classifiers, downloads, keys, own, queue
from slipstream.apps.service.context import Call, Service
from slipstream.apps.service.database import DatabaseUnavailable
from slipstream.apps.service.errors import ApiError
from slipstream.apps.service.serve import prepare, recover
from slipstream.apps.service.serve_options import ServeOptions
from slipstream.apps.service.upload import Upload

PART = '--b\r\nContent-Disposition: form-data; name="training_{}"\r\n\r\n{}\r\n'
CSV = "".join(f"text {i},class{i % 2}\n" for i in range(6))
LIMIT_S = 120


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    mask = os.umask(0o077)
    options = ServeOptions(data=str(tmp_path / "data"), queue=1, allow_host=("NLC.Example",))
    with contextlib.closing(prepare(options)) as service:
        recover(service)
        yield service
    os.umask(mask)


def call(service: Service, classifier: str = "", **headers: str) -> Call:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "headers": raw, "query_string": b""}
    made = Call({**scope, "path_params": {"id": classifier}})
    made.service, made.tenant = service, keys.Tenant(keys.LOCAL, keys.LOCAL, keys.QUOTA)
    return made


@contextlib.contextmanager
def upload(service: Service) -> Iterator[Upload]:
    with contextlib.closing(Upload(service.directory.incoming, b"b")) as upload:
        parts = PART.format("metadata", "{}") + PART.format("data", CSV)
        upload.parser.write(f"{parts}--b--\r\n".encode())
        upload.finish()
        yield upload


def create(service: Service) -> str:
    with upload(service) as received:
        return classifiers.create(call(service), received, None)


def add_version(service: Service, classifier: str) -> int:
    with upload(service) as received:
        return classifiers.add_version(call(service, classifier), received)


def end(service: Service, state: str) -> None:
    """End the job that waits."""
    with service.database.transaction() as database:
        held = queue.claim(database, "me", 1)
        assert held is not None
        assert queue.finish(database, held, state, None, 2)
        if state == "done":
            active = "UPDATE classifiers SET active = :version WHERE id = :id"
            database.run(active, id=held.classifier, version=held.version)


def folders(service: Service) -> set[str]:
    return {path.name for path in service.directory.classifiers.glob("*/*")}


def numbers(service: Service, table: str, column: str) -> list[int]:
    rows = service.database.run(f"SELECT {column} AS n FROM {table} ORDER BY n")
    return [row["n"] for row in rows]


def break_commit(service: Service, monkeypatch: pytest.MonkeyPatch, *, works: bool) -> None:
    """The answer to the next COMMIT is lost."""
    run = service.database.run

    def broken(statement: str, **values: object) -> list[dict[str, object]]:
        if statement != "COMMIT":
            return run(statement, **values)
        monkeypatch.undo()
        if works:
            run(statement)
        raise DatabaseUnavailable("the database does not answer")

    monkeypatch.setattr(service.database, "run", broken)


# ---- transactions that fail


@pytest.mark.parametrize("works", [False, True])
def test_a_version_whose_commit_failed(
    service: Service, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    classifier = create(service)
    end(service, "done")
    break_commit(service, monkeypatch, works=works)
    with pytest.raises(DatabaseUnavailable):
        add_version(service, classifier)
    assert folders(service) == ({"1", "2"} if works else {"1"})
    if not works:
        (service.directory.version(classifier, 2) / "left").mkdir(parents=True)  # by a kill
        assert add_version(service, classifier) == 2
        files = {path.name for path in service.directory.version(classifier, 2).iterdir()}
        assert files == {"data.csv"}


def test_a_create_whose_commit_failed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    break_commit(service, monkeypatch, works=False)
    with pytest.raises(DatabaseUnavailable):
        create(service)
    assert not list(service.directory.classifiers.iterdir())


def test_a_start_removes_what_has_no_row(service: Service) -> None:
    classifier = create(service)
    for path in (f"{classifier}/2", "other/1"):
        (service.directory.classifiers / path / "checkpoints").mkdir(parents=True)
    recover(service)
    assert folders(service) == {"1"}
    assert [path.name for path in service.directory.classifiers.iterdir()] == [classifier]


# ---- which versions and jobs are kept


def test_versions_that_failed_are_not_kept(service: Service) -> None:
    classifier = create(service)
    end(service, "done")
    for number in (2, 3):
        assert add_version(service, classifier) == number
        end(service, "failed")
    assert add_version(service, classifier) == 4
    assert folders(service) == {"1", "4"}
    assert numbers(service, "versions", "number") == [1, 4]
    assert numbers(service, "jobs", "version") == [1, 4]


def test_the_last_three_trained_versions_are_kept(service: Service) -> None:
    classifier = create(service)
    for number, state in enumerate(["done", "done", "failed", "done", "done"], start=1):
        end(service, state)
        assert add_version(service, classifier) == number + 1
    end(service, "done")
    with service.database.transaction() as database:
        queue.prune(database, classifier)
    assert numbers(service, "versions", "number") == [4, 5, 6]


def test_active_version_is_kept_however_old(service: Service) -> None:
    classifier = create(service)
    for number in (2, 3, 4, 5, 6):
        end(service, "done")
        with service.database.transaction() as database:
            database.run("UPDATE classifiers SET active = 1 WHERE id = :id", id=classifier)
        assert add_version(service, classifier) == number
    assert numbers(service, "versions", "number") == [1, 3, 4, 5, 6]


def test_the_newest_job_is_not_by_the_clock(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = create(service)
    end(service, "done")
    monkeypatch.setattr(classifiers, "now_ms", lambda: 5)  # the clock was set back
    assert add_version(service, classifier) == 2
    assert classifiers.find_job(call(service, classifier))["version"] == 2
    with pytest.raises(ApiError, match="still trains"):
        add_version(service, classifier)


def test_retry(service: Service) -> None:
    classifier = create(service)
    end(service, "failed")
    other = create(service)
    with pytest.raises(ApiError, match="Queue full"):
        own.retry(call(service, classifier))
    classifiers.delete(call(service, other))
    assert own.retry(call(service, classifier)).state == "waiting"
    assert len(service.database.run("SELECT id FROM jobs")) == 1  # the failed one is gone


def test_the_trainer_ends_purges(service: Service) -> None:
    """On PostgreSQL it may have claimed the job meanwhile."""
    classifier = create(service)
    classifiers.delete(call(service, classifier))
    assert not list(service.directory.classifiers.iterdir())
    assert [row["path"] for row in service.database.run("SELECT path FROM purges")] == [classifier]


# ---- events, files, hosts


def test_an_epoch_is_sent_once_it_is_over(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "EVENTS_S", 0.01)
    classifier = create(service)
    held = queue.claim(service.database, "me", 1)
    assert held is not None
    zero = queue.Progress(10, 20, 0, 2, 1.0, at=1, loss=0.5)
    one = queue.Progress(11, 20, 1, 2, 1.0, at=2, loss=0.4, held_accuracy=0.75)
    queue.record(service.database, held, [zero])

    async def follow() -> list[bytes]:
        events = own._follow(call(service, classifier), held.id, -1)
        seen = [await anext(events), await anext(events)]
        queue.record(service.database, held, [one])
        seen.append(await anext(events))
        queue.finish(service.database, held, "done", None, 3)
        return [*seen, *[event async for event in events]]

    seen = asyncio.run(asyncio.wait_for(follow(), LIMIT_S))
    names = [block.split(b"event: ")[1].split(b"\n")[0].decode() for block in seen[1:]]
    names = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
    assert names == ["progress", "epoch", "progress", "epoch", "progress", "end"]
    [last] = [block for block in seen if block.startswith(b"id: 1\n")]
    assert b'"held_accuracy":0.75' in last


def test_a_file_that_is_deleted_before_the_answer(tmp_path: Path) -> None:
    async def answer() -> None:
        scope = {"type": "http", "method": "GET", "headers": []}
        await downloads.Download(tmp_path / "gone")(scope, None, None)  # type: ignore[arg-type]

    with pytest.raises(ApiError, match="Not found"):
        asyncio.run(answer())


def test_hosts_have_no_case(service: Service) -> None:
    app._check_host(call(service, host="nlc.example"))
    for headers in ({"host": "evil"}, {"host": "localhost", "origin": "http://["}):
        with pytest.raises(ApiError, match="Forbidden"):
            app._check_host(call(service, **headers))
