"""The queue of training jobs: claim, lease, fencing, cancel.

    waiting → running → done | failed | cancelled

Only the holder of ``(owner, attempt)`` writes to a running job. Each claim raises ``attempt``, so a
trainer whose lease another one took over hits no row any more, whatever its clock says.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

import msgspec

from slipstream.service.database import Row, Transaction
from slipstream.service.serve_options import LEASE_MS

FRUITLESS_ATTEMPTS: Final = 3
OURS: Final = "id = :id AND owner = :owner AND attempt = :attempt AND state = 'running'"
UNFINISHED: Final = "state IN ('waiting', 'running')"

CLAIM: Final = """
UPDATE jobs SET state = 'running', owner = :me, attempt = attempt + 1,
  lease_until = :now + :lease, started = COALESCE(started, :now), attempt_started = :now,
  fruitless = CASE WHEN best_update > resumed_from THEN 0 ELSE fruitless + 1 END,
  resumed_from = best_update
WHERE id = (
  SELECT id FROM jobs WHERE cancel = 0
    AND (state = 'waiting' OR (state = 'running' AND lease_until < :now))
  ORDER BY COALESCE((SELECT MAX(j.started) FROM jobs j WHERE j.tenant = jobs.tenant), 0), queued, id
  LIMIT 1 {lock})
AND cancel = 0 AND (state = 'waiting' OR lease_until < :now) RETURNING *
"""


class Progress(msgspec.Struct, frozen=True):
    """A line of ``progress.jsonl``."""

    updates: int
    total: int
    epoch: int
    epochs: int
    samples_s: float
    at: int
    loss: float | None = None
    accuracy: float | None = None
    held_accuracy: float | None = None


class Claim(msgspec.Struct, frozen=True):
    """A running job and the right to write to it."""

    id: str
    classifier: str
    version: int
    owner: str
    attempt: int
    fruitless: int
    resumed_from: int

    def key(self) -> dict[str, object]:
        """The parameters of a fenced statement."""
        return {"id": self.id, "owner": self.owner, "attempt": self.attempt}


# ---- decisions


def is_poisoned(fruitless: int, resumed_from: int, best_update: int) -> bool:
    """Whether a job that ended without a result has to fail instead of being tried again.

    >>> is_poisoned(fruitless=2, resumed_from=40, best_update=40)
    True
    >>> is_poisoned(fruitless=2, resumed_from=40, best_update=41)
    False
    """
    return best_update <= resumed_from and fruitless + 1 >= FRUITLESS_ATTEMPTS


def percent(best_update: int, total: int) -> int:
    """How much is done. It does not fall when a job resumes from an older checkpoint.

    >>> percent(41, 100), percent(0, 0), percent(7, 5)
    (41, 0, 100)
    """
    return 0 if total <= 0 else min(100, 100 * best_update // total)


def seconds_left(job: Row, now: int) -> int | None:
    """An estimate from the rate of this attempt; None while there is none."""
    made: int = job["best_update"] - max(0, job["resumed_from"])
    if job["state"] != "running" or made <= 0 or not job["attempt_started"]:
        return None
    elapsed_ms: int = max(1, now - job["attempt_started"])
    left: int = job["total"] - job["best_update"]
    return max(0, round(left * elapsed_ms / made / 1000))


def minutes(seconds: int) -> str:
    """Time left in words.

    >>> minutes(20), minutes(61), minutes(200)
    ('less than a minute', 'about 1 minute', 'about 3 minutes')
    """
    if seconds < 60:
        return "less than a minute"
    count = round(seconds / 60)
    return f"about {count} minute{'s' if count > 1 else ''}"


# ---- statements


def enqueue(transaction: Transaction, classifier: str, version: int, tenant: str, now: int) -> str:
    """Add a waiting job; returns its id."""
    job = secrets.token_hex(8)
    transaction.run(
        "INSERT INTO jobs (id, classifier, version, tenant, state, queued)"
        " VALUES (:id, :classifier, :version, :tenant, 'waiting', :now)",
        {"id": job, "classifier": classifier, "version": version, "tenant": tenant, "now": now},
    )
    return job


def waiting(transaction: Transaction) -> int:
    """How many jobs wait."""
    row = transaction.one("SELECT COUNT(*) AS n FROM jobs WHERE state = 'waiting'")
    return int(row["n"]) if row else 0


def ahead(transaction: Transaction, job: Row) -> int:
    """How many jobs came before a waiting one and have not ended."""
    row = transaction.one(
        f"SELECT COUNT(*) AS n FROM jobs WHERE {UNFINISHED} AND id <> :id AND queued <= :queued",
        {"id": job["id"], "queued": job["queued"]},
    )
    return int(row["n"]) if row else 0


def claim(transaction: Transaction, me: str, now: int) -> Claim | None:
    """Take the next job: the tenant that started last comes last."""
    lock = "FOR UPDATE SKIP LOCKED" if transaction.postgres else ""
    values = {"me": me, "now": now, "lease": LEASE_MS}
    row = transaction.one(CLAIM.format(lock=lock), values)
    return None if row is None else msgspec.convert(row, Claim)


def beat(transaction: Transaction, held: Claim, now: int) -> bool:
    """Extend the lease. False: cancelled, deleted or taken over; end its processes."""
    values = {**held.key(), "until": now + LEASE_MS}
    statement = f"UPDATE jobs SET lease_until = :until WHERE {OURS} AND cancel = 0 RETURNING id"
    return transaction.one(statement, values) is not None


def record(transaction: Transaction, held: Claim, lines: Sequence[Progress]) -> None:
    """Write progress; ignored if the job is another's by now."""
    last = max(lines, key=lambda line: line.at)
    best = max(line.updates for line in lines)
    values = {**held.key(), "best": best, **msgspec.structs.asdict(last)}
    hit = transaction.one(
        "UPDATE jobs SET epoch = :epoch, epochs = :epochs, updates = :updates, total = :total,"
        " samples_s = :samples_s,"
        " best_update = CASE WHEN best_update < :best THEN :best ELSE best_update END"
        f" WHERE {OURS} RETURNING id",
        {
            name: values[name]
            for name in values
            if name not in ("loss", "accuracy", "held_accuracy", "at")
        },
    )
    curve = {line.epoch: line for line in lines if (line.loss, line.accuracy) != (None, None)}
    for line in curve.values() if hit else ():
        transaction.run(
            "INSERT INTO epochs (job, epoch, at, loss, accuracy, held_accuracy)"
            " VALUES (:job, :epoch, :at, :loss, :accuracy, :held_accuracy)"
            " ON CONFLICT (job, epoch) DO UPDATE SET at = excluded.at, loss = excluded.loss,"
            " accuracy = excluded.accuracy, held_accuracy = excluded.held_accuracy",
            {
                "job": held.id,
                **{
                    name: getattr(line, name)
                    for name in ("epoch", "at", "loss", "accuracy", "held_accuracy")
                },
            },
        )


def finish(transaction: Transaction, held: Claim, state: str, error: str | None, now: int) -> bool:
    """End a job as done, failed or cancelled. False if it is another's by now."""
    values = {**held.key(), "state": state, "error": error, "now": now}
    statement = (
        "UPDATE jobs SET state = CASE WHEN cancel = 1 AND :state = 'failed' THEN 'cancelled'"
        " ELSE :state END, error = :error, finished = :now, owner = NULL, lease_until = NULL"
        f" WHERE {OURS} RETURNING id"
    )
    return transaction.one(statement, values) is not None


def release(transaction: Transaction, held: Claim, *, blameless: bool) -> None:
    """Let a job wait again. ``blameless``: it was stopped, so the attempt does not count."""
    mark = ", resumed_from = -1" if blameless else ""
    transaction.run(
        f"UPDATE jobs SET state = 'waiting', owner = NULL, lease_until = NULL{mark} WHERE {OURS}",
        held.key(),
    )


def release_all(transaction: Transaction, now: int, *, blameless: bool) -> None:
    """Release every running job. Only for who knows that no trainer of this database lives."""
    mark = ", resumed_from = -1" if blameless else ""
    transaction.run(
        "UPDATE jobs SET state = 'cancelled', finished = :now, owner = NULL"
        " WHERE state = 'running' AND cancel = 1",
        {"now": now},
    )
    transaction.run(
        f"UPDATE jobs SET state = 'waiting', owner = NULL, lease_until = NULL{mark}"
        " WHERE state = 'running'"
    )


def cancel(transaction: Transaction, classifier: str, now: int) -> None:
    """Cancel what has not ended: at once if it waits, else by its trainer."""
    values = {"classifier": classifier, "now": now}
    transaction.run(
        "UPDATE jobs SET state = 'cancelled', finished = :now"
        " WHERE classifier = :classifier AND state = 'waiting'",
        values,
    )
    transaction.run(
        "UPDATE jobs SET cancel = 1 WHERE classifier = :classifier AND state = 'running'",
        {"classifier": classifier},
    )
