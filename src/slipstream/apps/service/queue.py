"""The queue of training jobs: claim, lease, fencing, cancel.

    waiting → running → done | failed | cancelled

Only the holder of ``(owner, attempt)`` writes to a running job. Each claim raises ``attempt``, so a
trainer whose lease another one took over hits no row any more, whatever its clock says.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

import msgspec

from slipstream.apps.service.database import Database, Row
from slipstream.apps.service.progress import Progress
from slipstream.apps.service.serve_options import LEASE_MS

FRUITLESS_ATTEMPTS: Final = 3
KEPT_VERSIONS: Final = 3
OURS: Final = "id = :id AND owner = :owner AND attempt = :attempt AND state = 'running'"
WAITS: Final = (  # unless it was cancelled
    "owner = NULL, lease_until = NULL, finished = CASE WHEN cancel = 1 THEN :now END,"
    " state = CASE WHEN cancel = 1 THEN 'cancelled' ELSE 'waiting' END"
)
BLAMELESS: Final = WAITS + ", resumed_from = -1"
NEWEST: Final = (
    "epoch = :epoch, epochs = :epochs, updates = :updates, total = :total, samples_s = :samples_s,"
    " updates_s = :updates_s,"
    " best_update = CASE WHEN best_update < :best THEN :best ELSE best_update END"
)
POINT: Final = """
INSERT INTO epochs (job, epoch, at, loss, accuracy, held_accuracy)
VALUES (:job, :epoch, :at, :loss, :accuracy, :held_accuracy)
ON CONFLICT (job, epoch) DO UPDATE SET at = excluded.at,
  loss = COALESCE(excluded.loss, epochs.loss),
  accuracy = COALESCE(excluded.accuracy, epochs.accuracy),
  held_accuracy = COALESCE(excluded.held_accuracy, epochs.held_accuracy)
"""
# Of the tenant of a job. The tenant that started last comes last.
LAST_START: Final = "COALESCE((SELECT t.last_start FROM tenants t WHERE t.id = jobs.tenant), 0)"
CLAIM: Final = """
UPDATE jobs SET state = 'running', owner = :me, attempt = attempt + 1, updates_s = 0,
  lease_until = :now + :lease, started = COALESCE(started, :now),
  fruitless = CASE WHEN best_update > resumed_from THEN 0 ELSE fruitless + 1 END,
  resumed_from = best_update
WHERE id = (
  SELECT id FROM jobs WHERE cancel = 0
    AND (state = 'waiting' OR (state = 'running' AND lease_until < :now))
  ORDER BY {last_start}, queued, id
  LIMIT 1 {lock})
AND cancel = 0 AND (state = 'waiting' OR lease_until < :now) RETURNING *
"""


class Claim(msgspec.Struct, frozen=True):
    """A running job and the right to write to it."""

    id: str
    classifier: str
    version: int
    owner: str
    attempt: int
    fruitless: int
    resumed_from: int
    cut_to: int = 0  # characters that longer texts are cut to; 0: none are

    def change(self, database: Database, change: str, also: str = "", **values: object) -> bool:
        """Change the job. False if it is another's by now, or was deleted."""
        key = {"id": self.id, "owner": self.owner, "attempt": self.attempt}
        statement = f"UPDATE jobs SET {change} WHERE {OURS} {also} RETURNING id"
        return bool(database.run(statement, **key, **values))


# ---- decisions


def is_poisoned(fruitless: int, resumed_from: int, best_update: int) -> bool:
    """Whether a job that ended without a result has to fail instead of being tried again.

    >>> is_poisoned(fruitless=2, resumed_from=40, best_update=40)
    True
    >>> is_poisoned(fruitless=2, resumed_from=40, best_update=41)
    False
    """
    return best_update <= resumed_from and fruitless + 1 >= FRUITLESS_ATTEMPTS


def turns(waiting: Sequence[Row]) -> list[str]:
    """The ids of waiting jobs in the order in which they begin: tenants take turns.

    >>> new = {"queued": 1, "last_start": 0}
    >>> turns([{"id": name, "tenant": name[0], **new} for name in ("a1", "a2", "b1")])
    ['a1', 'b1', 'a2']
    """
    by_tenant: dict[str, list[str]] = {}
    for job in sorted(waiting, key=lambda job: (job["last_start"], job["queued"], job["id"])):
        by_tenant.setdefault(job["tenant"], []).append(job["id"])
    rounds = zip_longest(*by_tenant.values())
    return [job for turn in rounds for job in turn if job is not None]


def percent(job: Row) -> int:
    """How much is done. It does not fall when a job resumes from an older checkpoint.

    >>> percent({"state": "running", "best_update": 41, "total": 100})
    41
    """
    if job["state"] == "done":
        return 100
    return min(100, 100 * job["best_update"] // job["total"]) if job["total"] > 0 else 0


def seconds_left(job: Row) -> int | None:
    """An estimate by the pace of this attempt; None while there is none.

    It is of all epochs that may come: less is left once the job knows that it stops early.

    >>> seconds_left({"state": "running", "updates": 40, "total": 100, "updates_s": 2.0})
    30
    """
    if job["state"] != "running" or job["updates_s"] <= 0:
        return None
    left: int = job["total"] - job["updates"]
    return max(0, round(left / float(job["updates_s"])))


def minutes(seconds: int, *, at_most: bool = False) -> str:
    """Time left in words.

    >>> minutes(20), minutes(61), minutes(200, at_most=True)
    ('less than a minute', 'about 1 minute', 'at most 3 minutes')
    """
    if seconds < 60:
        return "less than a minute"
    count = round(seconds / 60)
    return f"{'at most' if at_most else 'about'} {count} minute{'s' if count > 1 else ''}"


# ---- statements


def enqueue(database: Database, classifier: str, version: int, tenant: str, now: int) -> None:
    """Add a waiting job."""
    job = {"classifier": classifier, "version": version, "tenant": tenant}
    database.insert("jobs", id=secrets.token_hex(8), state="waiting", queued=now, **job)


def ahead(database: Database, job: Row) -> int:
    """How many jobs run, or will begin before a waiting one."""
    if job["state"] != "waiting":
        return 0
    jobs = database.run(
        f"SELECT id, tenant, queued, {LAST_START} AS last_start FROM jobs WHERE state = 'waiting'"
    )
    running = database.number("SELECT COUNT(*) AS n FROM jobs WHERE state = 'running'")
    waiting = turns(jobs)
    return running + (waiting.index(job["id"]) if job["id"] in waiting else 0)


def claim(database: Database, me: str, now: int) -> Claim | None:
    """Take the next job, by ``turns``. Call it in a transaction."""
    lock = "FOR UPDATE SKIP LOCKED" if database.postgres else ""
    statement = CLAIM.format(lock=lock, last_start=LAST_START)
    row = database.one(statement, me=me, now=now, lease=LEASE_MS)
    if row is None:
        return None
    # On the tenant, since the job may be deleted.
    turn = "UPDATE tenants SET last_start = :now WHERE id = :tenant"
    database.run(turn, now=now, tenant=row["tenant"])
    of_version = "SELECT COALESCE(MAX(cut_to), 0) AS n FROM versions"
    which = {"classifier": row["classifier"], "version": row["version"]}
    row["cut_to"] = database.number(
        f"{of_version} WHERE classifier = :classifier AND number = :version", **which
    )
    return msgspec.convert(row, Claim)


def beat(database: Database, held: Claim, now: int) -> bool:
    """Extend the lease. False: cancelled, deleted or taken over; end its processes."""
    return held.change(database, "lease_until = :until", "AND cancel = 0", until=now + LEASE_MS)


def record(
    database: Database, held: Claim, lines: Sequence[Progress], updates_s: float = 0
) -> None:
    """Write progress and the attempt's rate; ignored if the job is another's by now."""
    last = msgspec.structs.asdict(max(lines, key=lambda line: line.at))
    best = max(line.updates for line in lines)
    hit = held.change(database, NEWEST, best=best, updates_s=updates_s, **last)
    for line in lines if hit else ():
        if (line.loss, line.accuracy, line.held_accuracy) != (None, None, None):
            database.run(POINT, job=held.id, **msgspec.structs.asdict(line))


def finish(database: Database, held: Claim, state: str, error: str | None, now: int) -> bool:
    """End a job. One that was to be cancelled and failed is cancelled, and that is no error.

    False if it is another's by now.
    """
    return held.change(
        database,
        "state = CASE WHEN cancel = 1 AND :state = 'failed' THEN 'cancelled' ELSE :state END,"
        " error = CASE WHEN cancel = 1 AND :state = 'failed' THEN NULL ELSE :error END,"
        " finished = :now, owner = NULL, lease_until = NULL",
        state=state,
        error=error,
        now=now,
    )


def release(database: Database, held: Claim, now: int, *, blameless: bool) -> None:
    """Let a job wait again. ``blameless``: it was stopped, so the attempt does not count."""
    held.change(database, BLAMELESS if blameless else WAITS, now=now)


def release_all(database: Database, now: int, *, blameless: bool) -> None:
    """Release every running job. Only for who knows that no trainer of this database lives."""
    change = BLAMELESS if blameless else WAITS
    held = "state = 'running' OR (state = 'waiting' AND cancel = 1)"
    database.run(f"UPDATE jobs SET {change} WHERE {held}", now=now)


def cancel(database: Database, classifier: str, now: int) -> None:
    """Cancel what has not ended: at once if it waits, else by its trainer."""
    mine = "classifier = :classifier AND state IN ('waiting', 'running')"
    database.run(f"UPDATE jobs SET cancel = 1 WHERE {mine}", classifier=classifier)
    database.run(f"UPDATE jobs SET {WAITS} WHERE state = 'waiting' AND cancel = 1", now=now)


def prune(database: Database, classifier: str) -> list[int]:
    """Delete all versions but the active and the last trained ones; returns their numbers."""
    done = "SELECT DISTINCT version FROM jobs WHERE classifier = :id AND state = 'done'"
    gone = database.run(
        "DELETE FROM versions WHERE classifier = :id"
        " AND number NOT IN (SELECT COALESCE(active, 0) FROM classifiers WHERE id = :id)"
        f" AND number NOT IN ({done} ORDER BY version DESC LIMIT {KEPT_VERSIONS}) RETURNING number",
        id=classifier,
    )
    kept = "SELECT number FROM versions WHERE classifier = :id"
    jobs = f"DELETE FROM jobs WHERE classifier = :id AND version NOT IN ({kept})"
    database.run(jobs, id=classifier)
    return [row["number"] for row in gone]
