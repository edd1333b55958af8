"""Classifiers in the database and on disk: create, new version, status, delete.

Files are complete in ``incoming/`` before the transaction renames them into place and commits. A
kill in between leaves a directory without a row, which the next start removes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from slipstream.apps.service import keys, queue, rows
from slipstream.apps.service.context import Call
from slipstream.apps.service.data_directory import MODEL, remove
from slipstream.apps.service.database import Database, DatabaseUnavailable, Row, now_ms
from slipstream.apps.service.errors import MISSING_METADATA, ApiError, not_found
from slipstream.apps.service.phases import phase_of
from slipstream.apps.service.upload import BOM, Upload
from slipstream.runtime.files.whole_files import sync_directory

ID: Final = re.compile(r"[0-9a-f]{6}x[0-9a-f]{10}-nlc-[1-9][0-9]{0,8}")
LANGUAGES: Final = ("ar", "de", "en", "es", "fr", "it", "ja", "ko", "pt")
NAME: Final = re.compile(r"[^\0\r\n]{0,256}")
NO_JSON: Final = (
    "The part training_metadata is no JSON object such as "
    """{"language": "en", "name": "mail"}."""
)
DAY_MS: Final = 24 * 3600 * 1000
TRAINING: Final = (
    "The classifier instance is in its training phase, not yet ready to accept classify requests"
)
AVAILABLE: Final = (
    "The classifier instance is now available and is ready to take classifier requests."
)
NEWEST_JOBS: Final = """
SELECT j.*, c.name, c.language, c.created, c.active, v.rows, v.classes, v.bytes, v.cut,
  v.report AS accuracy
FROM classifiers c
JOIN jobs j ON j.id = (
  SELECT id FROM jobs WHERE classifier = c.id
  ORDER BY CASE WHEN state IN ('waiting', 'running') THEN 0 ELSE 1 END, version DESC, queued DESC
  LIMIT 1)
JOIN versions v ON v.classifier = c.id AND v.number = j.version
WHERE c.tenant = :tenant
"""


# ---- what comes in


def parse_metadata(raw: bytes) -> dict[str, str | None]:
    """Check the metadata of an upload.

    >>> parse_metadata(b'{"name": "mail", "language": "en-US"}')
    {'name': 'mail', 'language': 'en'}
    """
    try:
        fields = msgspec.json.decode(raw.removeprefix(BOM), type=dict[str, object])
    except (ValueError, RecursionError):
        reason = f"{MISSING_METADATA} {NO_JSON}"
        raise ApiError("Missing metadata", reason) from None
    name, language = fields.get("name"), fields.get("language", "en")
    language = "null" if language is None else language  # as the client wrote it
    if name is not None and not (isinstance(name, str) and NAME.fullmatch(name)):
        reason = "The 'name' is not a text of at most 256 characters without line ends."
        raise ApiError("Malformed metadata", reason)
    short = re.split("[-_]", language)[0].lower() if isinstance(language, str) else ""
    if short not in LANGUAGES:
        reason = f"The language '{str(language)[:40]}' is not one of {', '.join(LANGUAGES)}."
        raise ApiError("Unsupported language", reason)
    return {"name": name, "language": short}


def check_rows(call: Call, upload: Upload) -> dict[str, object]:
    """Check the rows of an upload; returns what the table of versions keeps."""
    cut_to, limits = asked_cut(call), call.service.options.limits
    counts = rows.check(upload.blocks(), limits, cut_to or rows.WHOLE)
    with upload.path.open("rb") as file:
        os.fsync(file.fileno())
        nbytes = os.fstat(file.fileno()).st_size
    sent = {"sha256": upload.sha256(), "bytes": nbytes, "cut_to": cut_to}
    return {**counts._asdict(), **sent}


def asked_cut(call: Call) -> int:
    """How many characters of a text an upload with ``?long=cut`` keeps; 0 without that."""
    asked = call.query_params.get("long", "")
    if asked not in ("", "cut"):
        reason = f"The parameter 'long' is {asked[:40]!r}; it can only be 'cut'."
        raise ApiError("Malformed query", reason)
    return call.service.options.limits.text_chars if asked else 0


# ---- writing


@contextlib.contextmanager
def _adding(call: Call, upload: Upload) -> Iterator[Database]:
    """A transaction that adds a version; if it fails, the files that it placed are removed."""
    database = call.service.database
    try:
        with database.transaction():
            yield database
    except BaseException:
        # Of a COMMIT whose answer was lost, only the database knows what became.
        known = "SELECT number FROM versions WHERE classifier = :id AND number = :number"
        path = upload.placed
        with contextlib.suppress(DatabaseUnavailable):
            if path and not database.run(known, id=path.parent.name, number=int(path.name)):
                remove(path.parent if path.name == "1" else path)
        raise


def create(call: Call, upload: Upload, key: str | None) -> str:
    """Make a classifier and its job; with an idempotency key that was used, return the first."""
    now, tenant = now_ms(), call.tenant
    metadata, checked = parse_metadata(upload.metadata), check_rows(call, upload)
    with _adding(call, upload) as database:
        use = {"tenant": tenant.id, "key": key, "sha256": checked["sha256"]}
        if key is not None and (first := _first_of(database, use, now)):
            return first
        if database.postgres:  # two creates at once would count the same
            database.run("LOCK TABLE classifiers IN SHARE ROW EXCLUSIVE MODE")
        owned = "SELECT COUNT(*) AS n FROM classifiers WHERE tenant = :tenant"
        if database.number(owned, tenant=tenant.id) >= tenant.quota:
            more = "serve" if tenant.id == keys.LOCAL else "keys add NAME"
            reason = (
                "This user or service instance has the maximum number of classifiers: "
                f"{tenant.quota}. Delete one, or ask the operator for more ('slipstream {more} "
                "--quota N')."
            )
            raise ApiError("Entitlement error", reason)
        serial = database.number("SELECT COALESCE(MAX(serial), 0) + 1 AS n FROM classifiers")
        classifier = f"{secrets.token_hex(3)}x{secrets.token_hex(5)}-nlc-{serial}"
        row = {"id": classifier, "tenant": tenant.id, "created": now, "serial": serial}
        database.insert("classifiers", **row, **metadata)
        if key is not None:
            database.insert("idempotency", classifier=classifier, at=now, **use)
        version = {"classifier": classifier, "number": 1, "created": now}
        _place(call, upload, {**version, **checked})
        return classifier


def _first_of(database: Database, use: dict[str, object], now: int) -> str | None:
    """The classifier that an idempotency key made within 24 hours."""
    database.run("DELETE FROM idempotency WHERE at < :past", past=now - DAY_MS)
    used = "SELECT * FROM idempotency WHERE tenant = :tenant AND key = :key"
    row = database.one(used, tenant=use["tenant"], key=use["key"])
    if row is not None and row["sha256"] != use["sha256"]:
        reason = "This Idempotency-Key was used for other bytes within 24 hours; take a new one."
        raise ApiError("Idempotency key reused", reason)
    return str(row["classifier"]) if row else None


def add_version(call: Call, upload: Upload) -> int:
    """Train a classifier anew on other data; the version that answers stays until it is done."""
    parse_metadata(upload.metadata)
    checked = check_rows(call, upload)
    with _adding(call, upload) as database:
        if find_job(call)["state"] in ("waiting", "running"):
            reason = "It still trains; wait for the end, or cancel it."
            raise ApiError("Classifier not available", reason)
        latest = "SELECT MAX(number) AS n FROM versions WHERE classifier = :id"
        number = database.number(latest, id=call.id) + 1
        old = queue.prune(database, call.id)
        version = {"classifier": call.id, "number": number, "created": now_ms()}
        _place(call, upload, {**version, **checked})
    for one in old:
        remove(call.service.directory.version(call.id, one))
    return number


def enqueue(call: Call, classifier: str, number: int, now: int) -> None:
    """Add a job; 429 if the queue is full."""
    database, limit = call.service.database, call.service.options.queue
    if database.number("SELECT COUNT(*) AS n FROM jobs WHERE state = 'waiting'") >= limit:
        raise ApiError("Queue full", f"{limit} jobs wait already; try again later.", retry_s=30)
    queue.enqueue(database, classifier, number, call.tenant.id, now)


def _place(call: Call, upload: Upload, version: Row) -> None:
    """Add a version and its job, and move its files into place."""
    classifier, number = version["classifier"], version["number"]
    call.service.database.insert("versions", **version)
    enqueue(call, classifier, number, version["created"])
    upload.placed = directory = call.service.directory.version(classifier, number)
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    remove(directory)  # its row is new: what is there is of a transaction that failed
    upload.directory.rename(directory)
    sync_directory(directory.parent)
    sync_directory(directory.parent.parent)


def delete(call: Call) -> dict[str, object]:
    """Delete a classifier: model, data, log, all of it."""
    database, directory = call.service.database, call.service.directory.classifiers / call.id
    lock = "FOR UPDATE" if database.postgres else ""  # the trainer does not claim it meanwhile
    with database.transaction():
        find_job(call)
        jobs = database.run(f"SELECT state FROM jobs WHERE classifier = :id {lock}", id=call.id)
        database.run("DELETE FROM classifiers WHERE id = :id", id=call.id)
        database.insert("purges", path=call.id, at=now_ms())
    call.service.models.forget(directory)
    if all(job["state"] != "running" for job in jobs):  # else the trainer does, once it has ended
        remove(directory)
    database.forget_deleted()
    return {}


# ---- reading


def find_job(call: Call) -> Row:
    """The newest job of a request's classifier, with what is known of this and of the version.

    404 if there is none, also if it is another tenant's.
    """
    known, statement = ID.fullmatch(call.id), f"{NEWEST_JOBS} AND c.id = :id"
    row = known and call.service.database.one(statement, tenant=call.tenant.id, id=call.id)
    if not row:
        raise not_found()
    return row


def find_jobs(call: Call) -> list[Row]:
    """The newest job of each classifier of a tenant, newest classifier first."""
    return call.service.database.run(f"{NEWEST_JOBS} ORDER BY c.serial DESC", tenant=call.tenant.id)


def model_path(call: Call, job: Row) -> Path:
    """The model file of the active version."""
    return call.service.directory.version(job["classifier"], job["active"]) / MODEL


def status(call: Call, job: Row) -> tuple[str, str]:
    """IBM's status of a classifier, and its sentence."""
    if job["active"] is not None:
        damage = call.service.models.damage(model_path(call, job))
        if damage is None:
            return "Available", AVAILABLE
        return "Unavailable", f"The model file is damaged: {damage}."
    if job["state"] in ("failed", "cancelled"):
        reason = "it was cancelled" if job["state"] == "cancelled" else job["error"] or "unknown"
        return "Failed", f"Training failed: {reason.rstrip('.')}."
    if job["state"] == "waiting":
        return "Training", f"{TRAINING} (waiting, {queue.ahead(call.service.database, job)} ahead)"
    left = queue.seconds_left(job)
    tail = ""
    if left is not None:
        folder = call.service.directory.version(job["classifier"], job["version"])
        at_most = phase_of(job["state"], folder).may_stop_early
        tail = f", {queue.minutes(left, at_most=at_most)} left"
    return "Training", f"{TRAINING} ({queue.percent(job)}%{tail})"
