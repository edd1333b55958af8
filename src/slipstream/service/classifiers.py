"""Classifiers in the database and on disk: create, new version, status, delete.

Files are complete in ``incoming/`` before the transaction renames them into place and commits. A
kill in between leaves a directory without a row, which the next start removes.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from slipstream.runtime.files.whole_files import replace_file, sync_directory
from slipstream.service import queue, rows
from slipstream.service.context import Service
from slipstream.service.data_directory import remove
from slipstream.service.database import Row, Transaction, now_ms
from slipstream.service.errors import MISSING_METADATA, ApiError, not_found, too_many
from slipstream.service.keys import Tenant
from slipstream.service.serve_options import LANGUAGES, NAME_CHARACTERS
from slipstream.service.upload import NBYTES_AT_ONCE, Upload

ID: Final = re.compile(r"[0-9a-f]{6}x[0-9a-f]{10}-nlc-[1-9][0-9]{0,8}")
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


class Status(msgspec.Struct, frozen=True):
    """IBM's status of a classifier, and its sentence."""

    status: str
    description: str


class Draft(msgspec.Struct, frozen=True):
    """A checked upload: its directory in ``incoming/``, and what is kept of it."""

    directory: Path
    rows: int
    classes: int
    sha256: str
    nbytes: int


# ---- what comes in


def parse_metadata(raw: bytes) -> Metadata:
    """Check the metadata of an upload.

    Raises:
        ApiError: 400, with the field.

    >>> parse_metadata(b'{"name": "mail", "language": "en-US"}')
    Metadata(name='mail', language='en')
    """
    try:
        fields = msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"), type=dict[str, object])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ApiError(400, "Missing metadata", MISSING_METADATA) from None
    name, language = fields.get("name"), fields.get("language", "en")
    if name is not None and (
        not isinstance(name, str)
        or len(name) > NAME_CHARACTERS
        or any(character in name for character in "\0\r\n")
    ):
        raise ApiError(
            400,
            "Malformed metadata",
            f"The 'name' is not a text of at most {NAME_CHARACTERS} characters without line ends.",
        )
    short = re.split("[-_]", language)[0].lower() if isinstance(language, str) else ""
    if short not in LANGUAGES:
        raise ApiError(
            400,
            "Unsupported language",
            f"The language '{str(language)[:40]}' is not one of {', '.join(LANGUAGES)}.",
        )
    return Metadata(name, short)


def prepare(service: Service, upload: Upload) -> Draft:
    """Read the rows of an upload and lay out the files of a version in ``incoming/``.

    Raises:
        Refused: The rows are not training data.
    """
    options = service.options
    limits = rows.Limits(max_rows=options.max_rows, max_classes=options.max_classes)
    read = rows.read(_blocks(upload.path), limits)
    sha256, nbytes = upload.sha256(), upload.path.stat().st_size
    directory = service.directory.incoming / secrets.token_hex(16)
    try:
        directory.mkdir(mode=0o700)
        with upload.path.open("rb") as file:
            os.fsync(file.fileno())
        upload.path.rename(directory / "data.csv")
        replace_file(directory / "rows.msgpack", [msgspec.msgpack.encode(read)])
    except BaseException:
        remove(directory)
        raise
    return Draft(directory, len(read.texts), len(read.labels), sha256, nbytes)


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(NBYTES_AT_ONCE):
            yield block


# ---- writing


def create(
    service: Service, tenant: Tenant, metadata: Metadata, draft: Draft, key: str | None
) -> str:
    """Make a classifier and its job; with an idempotency key that was used, the first one.

    Raises:
        ApiError: No room for the tenant or in the queue; the key was used for other bytes.
    """
    now = now_ms()
    with service.database.transaction() as transaction:
        if key is not None and (first := _repeated(transaction, tenant, key, draft.sha256, now)):
            return first
        _refuse_if_full(service, transaction, tenant)
        row = transaction.one("SELECT COALESCE(MAX(serial), 0) + 1 AS serial FROM classifiers")
        serial = int(row["serial"]) if row else 1
        classifier = f"{secrets.token_hex(3)}x{secrets.token_hex(5)}-nlc-{serial}"
        transaction.run(
            "INSERT INTO classifiers (id, tenant, name, language, created, serial)"
            " VALUES (:id, :tenant, :name, :language, :now, :serial)",
            {
                "id": classifier,
                "tenant": tenant.id,
                "name": metadata.name,
                "language": metadata.language,
                "now": now,
                "serial": serial,
            },
        )
        if key is not None:
            transaction.run(
                "INSERT INTO idempotency (tenant, key, sha256, classifier, at)"
                " VALUES (:tenant, :key, :sha256, :id, :now)",
                {
                    "tenant": tenant.id,
                    "key": key,
                    "sha256": draft.sha256,
                    "id": classifier,
                    "now": now,
                },
            )
        _add_version(service, transaction, classifier, 1, tenant, draft, now)
    return classifier


def add_version(service: Service, tenant: Tenant, classifier: str, draft: Draft) -> int:
    """Train a classifier anew on other data; the version that answers stays until it is done.

    Raises:
        ApiError: It is unknown, still trains, or the queue is full.
    """
    now = now_ms()
    with service.database.transaction() as transaction:
        find(transaction, tenant, classifier)
        job = newest_job(transaction, classifier)
        if job is not None and job["state"] in ("waiting", "running"):
            raise ApiError(
                409, "Classifier not available", "It still trains; wait for the end, or cancel it."
            )
        _refuse_if_queue_full(service, transaction)
        row = transaction.one(
            "SELECT MAX(number) + 1 AS next FROM versions WHERE classifier = :id",
            {"id": classifier},
        )
        number = int(row["next"]) if row else 1
        _add_version(service, transaction, classifier, number, tenant, draft, now)
    return number


def _add_version(
    service: Service,
    transaction: Transaction,
    classifier: str,
    number: int,
    tenant: Tenant,
    draft: Draft,
    now: int,
) -> None:
    transaction.run(
        "INSERT INTO versions (classifier, number, rows, classes, sha256, created, bytes)"
        " VALUES (:id, :number, :rows, :classes, :sha256, :now, :nbytes)",
        {
            "id": classifier,
            "number": number,
            "rows": draft.rows,
            "classes": draft.classes,
            "sha256": draft.sha256,
            "now": now,
            "nbytes": draft.nbytes,
        },
    )
    queue.enqueue(transaction, classifier, number, tenant.id, now)
    place = service.directory.version(classifier, number)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    draft.directory.rename(place)
    sync_directory(place.parent)
    sync_directory(place.parent.parent)


def _repeated(
    transaction: Transaction, tenant: Tenant, key: str, sha256: str, now: int
) -> str | None:
    transaction.run("DELETE FROM idempotency WHERE at < :past", {"past": now - DAY_MS})
    row = transaction.one(
        "SELECT sha256, classifier FROM idempotency WHERE tenant = :tenant AND key = :key",
        {"tenant": tenant.id, "key": key},
    )
    if row is not None and row["sha256"] != sha256:
        raise ApiError(
            422,
            "Idempotency key reused",
            "This Idempotency-Key was used for other bytes within 24 hours; take a new one.",
        )
    return None if row is None else str(row["classifier"])


def _refuse_if_full(service: Service, transaction: Transaction, tenant: Tenant) -> None:
    if transaction.postgres:  # two creates at once would count the same
        transaction.run("SELECT id FROM tenants WHERE id = :id FOR UPDATE", {"id": tenant.id})
        transaction.run("LOCK TABLE classifiers IN SHARE ROW EXCLUSIVE MODE")
    row = transaction.one(
        "SELECT COUNT(*) AS n FROM classifiers WHERE tenant = :tenant", {"tenant": tenant.id}
    )
    if row is not None and row["n"] >= tenant.quota:
        raise ApiError(
            400,
            "Entitlement error",
            "This user or service instance has the maximum number of classifiers.",
        )
    _refuse_if_queue_full(service, transaction)


def _refuse_if_queue_full(service: Service, transaction: Transaction) -> None:
    if queue.waiting(transaction) >= service.options.queue:
        raise too_many(
            "Queue full", f"{service.options.queue} jobs wait already; try again later.", 30
        )


def delete(service: Service, tenant: Tenant, classifier: str) -> None:
    """Delete a classifier, its files and all that is known of it.

    A job that runs is ended by the trainer, which then removes the files.
    """
    place = service.directory.classifier(classifier)
    with service.database.transaction() as transaction:
        find(transaction, tenant, classifier)
        job = newest_job(transaction, classifier)
        running = job is not None and job["state"] == "running"
        transaction.run("DELETE FROM classifiers WHERE id = :id", {"id": classifier})
        transaction.run(
            "INSERT INTO purges (path, at) VALUES (:path, :now)",
            {"path": classifier, "now": now_ms()},
        )
    service.models.forget(place)
    if not running:
        remove(place)
        with service.database.transaction() as transaction:
            transaction.run("DELETE FROM purges WHERE path = :path", {"path": classifier})
    service.database.forget_deleted()


# ---- reading


def find(transaction: Transaction, tenant: Tenant, classifier: str) -> Row:
    """The row of a tenant's classifier.

    Raises:
        ApiError: 404, also if it is another tenant's.
    """
    if not ID.fullmatch(classifier):
        raise not_found()
    row = transaction.one(
        "SELECT * FROM classifiers WHERE id = :id AND tenant = :tenant",
        {"id": classifier, "tenant": tenant.id},
    )
    if row is None:
        raise not_found()
    return row


def newest_job(transaction: Transaction, classifier: str) -> Row | None:
    """The last job of a classifier."""
    return transaction.one(
        "SELECT * FROM jobs WHERE classifier = :id ORDER BY queued DESC, version DESC LIMIT 1",
        {"id": classifier},
    )


def status(service: Service, transaction: Transaction, row: Row) -> Status:
    """IBM's status of a classifier."""
    if row["active"] is not None:
        path = service.directory.version(row["id"], row["active"]) / "model.safetensors"
        damage = service.models.damage(path)
        if damage is None:
            return Status("Available", AVAILABLE)
        return Status("Unavailable", f"The model file is damaged: {damage}.")
    job = newest_job(transaction, row["id"])
    if job is None or job["state"] in ("failed", "cancelled"):
        reason = "cancelled" if job is None or job["state"] == "cancelled" else job["error"]
        return Status("Failed", f"Training failed: {str(reason or 'unknown').rstrip('.')}.")
    if job["state"] == "waiting":
        return Status("Training", f"{TRAINING} (waiting, {queue.ahead(transaction, job)} ahead)")
    done = f"{queue.percent(job['best_update'], job['total'])}%"
    left = queue.seconds_left(job, now_ms())
    tail = "" if left is None else f", {queue.minutes(left)} left"
    return Status("Training", f"{TRAINING} ({done}{tail})")
