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

from slipstream.runtime.files.whole_files import replace_file, sync_directory
from slipstream.service import queue, rows
from slipstream.service.context import Call
from slipstream.service.data_directory import MODEL, remove
from slipstream.service.database import Row, Statements, now_ms
from slipstream.service.errors import MISSING_METADATA, ApiError, not_found
from slipstream.service.upload import BOM, Upload

ID: Final = re.compile(r"[0-9a-f]{6}x[0-9a-f]{10}-nlc-[1-9][0-9]{0,8}")
LANGUAGES: Final = ("ar", "de", "en", "es", "fr", "it", "ja", "ko", "pt")
NAME: Final = re.compile(r"[^\0\r\n]{0,256}")
DAY_MS: Final = 24 * 3600 * 1000
TRAINING: Final = (
    "The classifier instance is in its training phase, not yet ready to accept classify requests"
)
AVAILABLE: Final = (
    "The classifier instance is now available and is ready to take classifier requests."
)


class Metadata(msgspec.Struct, frozen=True):
    """What describes a classifier."""

    name: str | None
    language: str


class Draft(msgspec.Struct, frozen=True):
    """A checked upload: its directory in ``incoming/``, and the figures that are kept of it."""

    metadata: Metadata
    directory: Path
    figures: dict[str, object]


# ---- what comes in


def parse_metadata(raw: bytes) -> Metadata:
    """Check the metadata of an upload.

    Raises:
        ApiError: 400, with the field.

    >>> parse_metadata(b'{"name": "mail", "language": "en-US"}')
    Metadata(name='mail', language='en')
    """
    try:
        fields = msgspec.json.decode(raw.removeprefix(BOM), type=dict[str, object])
    except (ValueError, RecursionError):
        raise ApiError("Missing metadata", MISSING_METADATA) from None
    name, language = fields.get("name"), fields.get("language", "en")
    if name is not None and not (isinstance(name, str) and NAME.fullmatch(name)):
        reason = "The 'name' is not a text of at most 256 characters without line ends."
        raise ApiError("Malformed metadata", reason)
    short = re.split("[-_]", language)[0].lower() if isinstance(language, str) else ""
    if short not in LANGUAGES:
        reason = f"The language '{str(language)[:40]}' is not one of {', '.join(LANGUAGES)}."
        raise ApiError("Unsupported language", reason)
    return Metadata(name, short)


@contextlib.contextmanager
def prepared(call: Call, upload: Upload) -> Iterator[Draft]:
    """Check an upload, and lay out the files of a version in ``incoming/``.

    Raises:
        ApiError: The metadata cannot be used.
        Refused: The rows are not training data.
    """
    metadata = parse_metadata(upload.metadata)
    read = rows.read(upload.blocks(), call.service.options.limits)
    figures = {
        "rows": len(read.texts),
        "classes": len(read.labels),
        "sha256": upload.sha256(),
        "bytes": upload.path.stat().st_size,
    }
    directory = call.service.directory.incoming / secrets.token_hex(16)
    try:
        directory.mkdir(mode=0o700)
        with upload.path.open("rb") as file:
            os.fsync(file.fileno())
        upload.path.rename(directory / "data.csv")
        replace_file(directory / "rows.msgpack", [msgspec.msgpack.encode(read)])
        yield Draft(metadata, directory, figures)
    finally:
        remove(directory)  # unless it was moved into place


# ---- writing


def create(call: Call, upload: Upload, key: str | None) -> str:
    """Make a classifier and its job; with an idempotency key that was used, the first one.

    Raises:
        ApiError: No room for the tenant or in the queue; the key was used for other bytes.
    """
    now, tenant = now_ms(), call.tenant
    with prepared(call, upload) as draft, call.service.database.transaction() as transaction:
        sha256 = draft.figures["sha256"]
        if key is not None and (first := _repeated(transaction, tenant.id, key, sha256, now)):
            return first
        if transaction.postgres:  # two creates at once would count the same
            transaction.run("LOCK TABLE classifiers IN SHARE ROW EXCLUSIVE MODE")
        owned = "SELECT COUNT(*) AS n FROM classifiers WHERE tenant = :tenant"
        if transaction.number(owned, tenant=tenant.id) >= tenant.quota:
            reason = "This user or service instance has the maximum number of classifiers."
            raise ApiError("Entitlement error", reason)
        serial = transaction.number("SELECT COALESCE(MAX(serial), 0) + 1 AS n FROM classifiers")
        classifier = f"{secrets.token_hex(3)}x{secrets.token_hex(5)}-nlc-{serial}"
        transaction.insert(
            "classifiers",
            id=classifier,
            tenant=tenant.id,
            created=now,
            serial=serial,
            **msgspec.structs.asdict(draft.metadata),
        )
        if key is not None:
            used = {"tenant": tenant.id, "key": key, "sha256": sha256, "at": now}
            transaction.insert("idempotency", classifier=classifier, **used)
        _add_version(call, transaction, classifier, 1, draft, now)
        return classifier


def add_version(call: Call, upload: Upload) -> int:
    """Train a classifier anew on other data; the version that answers stays until it is done.

    Raises:
        ApiError: It is unknown, still trains, or the queue is full.
    """
    with prepared(call, upload) as draft, call.service.database.transaction() as transaction:
        find(transaction, call)
        if newest_job(transaction, call.id)["state"] in ("waiting", "running"):
            reason = "It still trains; wait for the end, or cancel it."
            raise ApiError("Classifier not available", reason)
        latest = "SELECT MAX(number) AS n FROM versions WHERE classifier = :id"
        number = transaction.number(latest, id=call.id) + 1
        _add_version(call, transaction, call.id, number, draft, now_ms())
        return number


def _add_version(
    call: Call, transaction: Statements, classifier: str, number: int, draft: Draft, now: int
) -> None:
    if queue.waiting(transaction) >= (limit := call.service.options.queue):
        raise ApiError("Queue full", f"{limit} jobs wait already; try again later.", retry_s=30)
    place = {"classifier": classifier, "number": number}
    transaction.insert("versions", created=now, **place, **draft.figures)
    queue.enqueue(transaction, classifier, number, call.tenant.id, now)
    directory = call.service.directory.version(classifier, number)
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    draft.directory.rename(directory)
    sync_directory(directory.parent)
    sync_directory(directory.parent.parent)


def _repeated(
    transaction: Statements, tenant: str, key: str, sha256: object, now: int
) -> str | None:
    transaction.run("DELETE FROM idempotency WHERE at < :past", past=now - DAY_MS)
    row = transaction.one(
        "SELECT sha256, classifier FROM idempotency WHERE tenant = :tenant AND key = :key",
        tenant=tenant,
        key=key,
    )
    if row is not None and row["sha256"] != sha256:
        reason = "This Idempotency-Key was used for other bytes within 24 hours; take a new one."
        raise ApiError("Idempotency key reused", reason)
    return None if row is None else str(row["classifier"])


def delete(call: Call) -> None:
    """Delete a classifier, its files and all that is known of it.

    A job that runs is ended by the trainer, which then removes the files.
    """
    database, place = call.service.database, call.service.directory.classifiers / call.id
    with database.transaction() as transaction:
        find(transaction, call)
        running = newest_job(transaction, call.id)["state"] == "running"
        transaction.run("DELETE FROM classifiers WHERE id = :id", id=call.id)
        transaction.insert("purges", path=call.id, at=now_ms())
    call.service.models.forget(place)
    if not running:
        remove(place)
        database.run("DELETE FROM purges WHERE path = :id", id=call.id)
    database.forget_deleted()


# ---- reading


def find(database: Statements, call: Call) -> Row:
    """The classifier that a request is about.

    Raises:
        ApiError: 404, also if it is another tenant's.
    """
    statement = "SELECT * FROM classifiers WHERE id = :id AND tenant = :tenant"
    if not ID.fullmatch(call.id) or not (
        row := database.one(statement, id=call.id, tenant=call.tenant.id)
    ):
        raise not_found()
    return row


def newest_job(database: Statements, classifier: str) -> Row:
    """The last job of a classifier, with the figures of its version.

    Raises:
        ApiError: 404; it was deleted meanwhile.
    """
    row = database.one(
        "SELECT j.*, v.rows, v.classes, v.bytes, v.report AS accuracy FROM jobs j"
        " JOIN versions v ON v.classifier = j.classifier AND v.number = j.version"
        " WHERE j.classifier = :id ORDER BY j.queued DESC, j.version DESC LIMIT 1",
        id=classifier,
    )
    if row is None:
        raise not_found()
    return row


def find_with_job(call: Call) -> tuple[Row, Row]:
    """The classifier that a request is about, and its newest job."""
    with call.service.database.reading() as reading:
        return find(reading, call), newest_job(reading, call.id)


def status(call: Call, row: Row, job: Row) -> tuple[str, str]:
    """IBM's status of a classifier, and its sentence."""
    service = call.service
    if row["active"] is not None:
        damage = service.models.damage(service.directory.version(row["id"], row["active"]) / MODEL)
        if damage is None:
            return "Available", AVAILABLE
        return "Unavailable", f"The model file is damaged: {damage}."
    if job["state"] in ("failed", "cancelled"):
        reason = "cancelled" if job["state"] == "cancelled" else job["error"] or "unknown"
        return "Failed", f"Training failed: {reason.rstrip('.')}."
    if job["state"] == "waiting":
        return "Training", f"{TRAINING} (waiting, {queue.ahead(service.database, job)} ahead)"
    left = queue.seconds_left(job)
    tail = "" if left is None else f", {queue.minutes(left)} left"
    return "Training", f"{TRAINING} ({queue.percent(job)}%{tail})"
