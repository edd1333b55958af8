"""The queue on every database: one holder a job, fair turns, poisoned jobs fail."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.apps.service import keys, queue
from slipstream.apps.service.database import Database
from slipstream.apps.service.serve_options import LEASE_MS


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    if request.param == "sqlite":
        address, schema = str(tmp_path / "service.db"), ""
    else:
        server = request.getfixturevalue("postgres")
        schema = f"test_{secrets.token_hex(4)}"
        with Database(server) as admin, admin.transaction() as transaction:
            transaction.run(f"CREATE SCHEMA {schema}")
        address = f"{server}{'&' if '?' in server else '?'}options=-csearch_path%3D{schema}"
    with Database(address) as database:
        database.migrate()
        database.migrate()  # a second time changes nothing
        yield database
    if schema:
        with Database(server) as admin, admin.transaction() as transaction:
            transaction.run(f"DROP SCHEMA {schema} CASCADE")


def job(database: Database, tenant: str, queued: int) -> str:
    name = f"c{queued}"
    with database.transaction() as transaction:
        keys.add_tenant(transaction, tenant, tenant, 8)
        transaction.run(
            "INSERT INTO classifiers (id, tenant, language, created, serial)"
            " VALUES (:id, :tenant, 'en', 0, :serial)",
            id=name,
            tenant=tenant,
            serial=queued,
        )
        queue.enqueue(transaction, name, 1, tenant, queued)
    return name


def claim(database: Database, now: int, me: str = "me") -> queue.Claim | None:
    with database.transaction() as transaction:
        return queue.claim(transaction, me, now)


def state(database: Database, classifier: str) -> str:
    with database.reading() as reading:
        row = reading.one("SELECT state FROM jobs WHERE classifier = :c", c=classifier)
    assert row is not None
    return str(row["state"])


def line(updates: int) -> queue.Progress:
    return queue.Progress(updates, 100, 1, 2, 50.0, at=updates, loss=0.5)


def test_the_number_ahead_counts_the_jobs_that_begin_before(database: Database) -> None:
    for tenant, at in [("a", 1), ("a", 2), ("b", 3), ("a", 4), ("c", 5), ("b", 6)]:
        job(database, tenant, at)
    first = claim(database, 10)
    assert first is not None
    waiting = database.run("SELECT * FROM jobs WHERE state = 'waiting'")
    told = {queue.ahead(database, one): one["classifier"] for one in waiting}
    taken = [claim(database, now) for now in range(11, 16)]
    # One runs already, so the next one has one ahead.
    assert told == {place: one.classifier for place, one in enumerate(taken, start=1) if one}
    assert queue.ahead(database, {"state": "running"}) == 0


def test_tenants_take_turns(database: Database) -> None:
    order = [job(database, tenant, at) for tenant, at in [("a", 1), ("a", 2), ("a", 3), ("b", 4)]]
    taken = [claim(database, now) for now in (10, 11, 12, 13)]
    assert [one.classifier for one in taken if one] == [order[0], order[3], order[1], order[2]]
    assert claim(database, 14) is None


@pytest.mark.parametrize("owner", ["another trainer", "the same trainer"])
def test_only_the_holder_writes(database: Database, owner: str) -> None:
    """A trainer whose lease ended may claim the job again: its first claim is not the holder."""
    classifier = job(database, "a", 1)
    first = claim(database, 10, "the same trainer")
    second = claim(database, 10 + LEASE_MS + 1, owner)
    assert first is not None
    assert second is not None
    assert second.attempt == 2
    with database.transaction() as transaction:
        assert not queue.beat(transaction, first, 99)
        assert not queue.finish(transaction, first, "done", None, 99)
        queue.record(transaction, first, [line(90)])
        queue.release(transaction, first, 99, blameless=True)
        assert queue.beat(transaction, second, 99)
        assert transaction.one("SELECT best_update, state FROM jobs") == {
            "best_update": 0,
            "state": "running",
        }
        assert queue.finish(transaction, second, "done", None, 100)
    assert state(database, classifier) == "done"


def test_progress_does_not_fall(database: Database) -> None:
    job(database, "a", 1)
    held = claim(database, 10)
    assert held is not None
    with database.transaction() as transaction:
        queue.record(transaction, held, [line(40), line(50)])
        queue.record(transaction, held, [line(20)])
        row = transaction.one("SELECT updates, best_update FROM jobs")
        assert row == {"updates": 20, "best_update": 50}
        assert transaction.run("SELECT epoch, loss FROM epochs") == [{"epoch": 1, "loss": 0.5}]


def test_the_time_left_is_by_the_pace_of_the_attempt(database: Database) -> None:
    job(database, "a", 1)
    held = claim(database, 10)
    assert held is not None
    with database.transaction() as transaction:
        for updates_s, left in [(0.0, None), (0.5, 80), (2.0, 20)]:
            queue.record(transaction, held, [line(60)], updates_s)
            row = transaction.one("SELECT * FROM jobs")
            assert row is not None
            assert queue.seconds_left(row) == left


def test_a_job_that_stops_early_has_fewer_epochs_and_less_time_left(database: Database) -> None:
    job(database, "a", 1)
    held = claim(database, 10)
    assert held is not None
    with database.transaction() as transaction:
        queue.record(transaction, held, [queue.Progress(40, 200, 40, 200, 1.0, at=1)], 2.0)
        queue.record(transaction, held, [queue.Progress(41, 61, 41, 61, 1.0, at=2)], 2.0)
        row = transaction.one("SELECT * FROM jobs")
    assert row is not None
    assert (row["epochs"], queue.percent(row), queue.seconds_left(row)) == (61, 67, 10)


def test_attempts_without_progress_are_counted(database: Database) -> None:
    job(database, "a", 1)
    seen = []
    for now in range(10, 14):
        held = claim(database, now)
        assert held is not None
        seen.append(held.fruitless)
        with database.transaction() as transaction:
            if now == 12:
                queue.record(transaction, held, [line(5)])
            queue.release(transaction, held, now, blameless=False)
    assert seen == [0, 1, 2, 0]


def test_a_stop_is_not_blamed_on_the_job(database: Database) -> None:
    job(database, "a", 1)
    for now in range(10, 20):
        held = claim(database, now)
        assert held is not None
        assert held.fruitless == 0
        with database.transaction() as transaction:
            queue.release_all(transaction, now, blameless=True)


def test_cancel(database: Database) -> None:
    waits, runs = job(database, "a", 2), job(database, "b", 1)
    held = claim(database, 10)
    assert held is not None
    with database.transaction() as transaction:
        queue.cancel(transaction, waits, 11)
        queue.cancel(transaction, runs, 11)
        assert not queue.beat(transaction, held, 12)
        assert queue.finish(transaction, held, "failed", "cancelled", 13)
        assert transaction.run("SELECT DISTINCT state, error FROM jobs") == [
            {"state": "cancelled", "error": None}
        ]
    assert claim(database, 10**9) is None


@pytest.mark.parametrize("blameless", [False, True])
def test_a_cancelled_job_does_not_wait_again(database: Database, blameless: bool) -> None:
    classifier = job(database, "a", 1)
    held = claim(database, 10)
    assert held is not None
    with database.transaction() as transaction:
        queue.cancel(transaction, classifier, 11)
        queue.release(transaction, held, 12, blameless=blameless)
        [row] = transaction.run("SELECT state, finished, owner FROM jobs")
        assert row == {"state": "cancelled", "finished": 12, "owner": None}
        transaction.run("UPDATE jobs SET state = 'waiting'")  # as earlier versions left it
        queue.release_all(transaction, 13, blameless=blameless)
    assert state(database, classifier) == "cancelled"


def test_held_out_accuracy_is_kept(database: Database) -> None:
    job(database, "a", 1)
    held = claim(database, 10)
    assert held is not None
    measured = queue.Progress(3, 100, 1, 2, 50.0, at=3, loss=0.5, held_accuracy=0.75)
    with database.transaction() as transaction:
        for lines in ([line(2)], [measured, line(4)], [line(5)]):
            queue.record(transaction, held, lines)
            points = transaction.run("SELECT at, held_accuracy FROM epochs")
            assert len(points) == 1
        assert points == [{"at": 5, "held_accuracy": 0.75}]


def test_held_out_accuracy_is_kept_without_a_training_loss(database: Database) -> None:
    """The report's comes right after another line, so there may be no batch between."""
    job(database, "a", 1)
    held = claim(database, 10)
    assert held is not None
    with database.transaction() as transaction:
        queue.record(
            transaction, held, [queue.Progress(3, 100, 1, 2, 50.0, at=3, held_accuracy=0.75)]
        )
        assert transaction.run("SELECT held_accuracy FROM epochs") == [{"held_accuracy": 0.75}]


def test_a_transaction_that_fails_leaves_nothing(database: Database) -> None:
    def fail() -> None:
        with database.transaction() as transaction:
            keys.add_key(transaction, "team", 8)
            raise KeyError("team")

    with pytest.raises(KeyError):
        fail()
    with database.reading() as reading:
        assert not keys.any_key(reading)


def test_a_tenant_that_deletes_its_jobs_has_no_more_turns(database: Database) -> None:
    mine = [job(database, "a", at) for at in (1, 4, 5)]
    theirs = [job(database, "b", at) for at in (2, 3)]
    order = []
    for now in range(10, 15):
        held = claim(database, now)
        assert held is not None
        order.append(held.classifier)
        if held.classifier in mine:
            database.run("DELETE FROM classifiers WHERE id = :id", id=held.classifier)
    assert order == [mine[0], theirs[0], mine[1], theirs[1], mine[2]]
