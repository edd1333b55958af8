"""Our own API, ``/api``: progress, report, log, downloads, versions; health; the page's files."""

from __future__ import annotations

import csv
import io
import time
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from slipstream.service import classifiers, queue
from slipstream.service.context import service_of, tenant_of_request
from slipstream.service.data_directory import remove
from slipstream.service.database import DatabaseUnavailable, Row, now_ms
from slipstream.service.errors import ApiError, not_found
from slipstream.service.events import follow
from slipstream.service.serve_options import FREE_NBYTES
from slipstream.service.v1 import as_json, receive_upload

LOG_NBYTES: Final = 64 * 1024
WELL_S: Final = 30.0
CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
)
PAGE_TYPES: Final = {
    "index.html": "text/html",
    "page.js": "text/javascript",
    "page.css": "text/css",
}
FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


class JobState(msgspec.Struct, frozen=True):
    """The newest job of a classifier."""

    state: str
    ahead: int
    percent: int
    epoch: int
    epochs: int
    updates: int
    samples_s: float
    eta_s: int | None
    attempt: int
    version: int
    rows: int
    classes: int
    bytes: int
    started: int | None
    finished: int | None
    error: str | None
    accuracy: float | None


class Version(msgspec.Struct, frozen=True):
    """A version of a classifier."""

    number: int
    rows: int
    classes: int
    created: int
    accuracy: float | None
    active: bool
    trained: bool


class Changed(msgspec.Struct, frozen=True):
    """The version that a request was about."""

    version: int


# ---- state


def _newest(request: Request) -> tuple[Row, Row, JobState]:
    """The classifier, its newest job, and what is shown of that."""
    service = service_of(request)
    with service.database.reading() as reading:
        row = classifiers.find(reading, tenant_of_request(request), request.path_params["id"])
        job = classifiers.newest_job(reading, row["id"])
        version = (
            None
            if job is None
            else reading.one(
                "SELECT * FROM versions WHERE classifier = :id AND number = :number",
                {"id": row["id"], "number": job["version"]},
            )
        )
        if job is None or version is None:
            raise not_found()
        ahead = queue.ahead(reading, job) if job["state"] == "waiting" else 0
    done = 100 if job["state"] == "done" else queue.percent(job["best_update"], job["total"])
    state = JobState(
        state=job["state"],
        ahead=ahead,
        percent=done,
        eta_s=queue.seconds_left(job, now_ms()),
        accuracy=version["report"],
        **{name: job[name] for name in ("epoch", "epochs", "updates", "samples_s", "attempt")},
        **{name: job[name] for name in ("version", "started", "finished", "error")},
        **{name: version[name] for name in ("rows", "classes", "bytes")},
    )
    return row, job, state


async def show(request: Request) -> Response:
    """GET /api/classifiers/{id}"""
    _, _, state = await service_of(request).call(_newest, request)
    return as_json(state)


async def events(request: Request) -> Response:
    """GET …/events"""
    service = service_of(request)
    _, job, _ = await service.call(_newest, request)
    last = request.headers.get("last-event-id", "")
    after = int(last) if last.isdigit() and len(last) < 10 else -1

    def state() -> tuple[str, object]:
        try:
            _, _, found = _newest(request)
        except ApiError:  # deleted
            return "cancelled", None
        return found.state, found

    return StreamingResponse(
        follow(service, state, job["id"], after),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def cancel(request: Request) -> Response:
    """POST …/cancel; 200 also if it is over."""
    service, tenant = service_of(request), tenant_of_request(request)

    def change() -> None:
        with service.database.transaction() as transaction:
            row = classifiers.find(transaction, tenant, request.path_params["id"])
            queue.cancel(transaction, row["id"], now_ms())

    await service.call(change)
    return await show(request)


async def retry(request: Request) -> Response:
    """POST …/retry: train again on the same data, if the last job failed."""
    service, tenant = service_of(request), tenant_of_request(request)
    service.refuse_if_stopping()

    def change() -> None:
        with service.database.transaction() as transaction:
            row = classifiers.find(transaction, tenant, request.path_params["id"])
            job = classifiers.newest_job(transaction, row["id"])
            if job is None or job["state"] not in ("failed", "cancelled"):
                raise ApiError(409, "Classifier not available", "Only what failed can be retried.")
            remove(service.directory.version(row["id"], job["version"]) / "checkpoints")
            queue.enqueue(transaction, row["id"], job["version"], tenant.id, now_ms())

    await service.call(change)
    return await show(request)


# ---- versions


async def put_data(request: Request) -> Response:
    """PUT …/data: version n + 1, under the same id."""
    service, tenant = service_of(request), tenant_of_request(request)
    service.refuse_if_stopping()
    upload = await receive_upload(request)
    try:
        classifiers.parse_metadata(upload.metadata)
        draft = await service.call(classifiers.prepare, service, upload)
        try:
            number = await service.call(
                classifiers.add_version, service, tenant, request.path_params["id"], draft
            )
        finally:
            remove(draft.directory)
    finally:
        upload.close()
    return as_json(Changed(number))


async def versions(request: Request) -> Response:
    """GET …/versions, newest first"""
    service, tenant = service_of(request), tenant_of_request(request)

    def read() -> list[Version]:
        with service.database.reading() as reading:
            row = classifiers.find(reading, tenant, request.path_params["id"])
            found = reading.run(
                "SELECT * FROM versions WHERE classifier = :id ORDER BY number DESC",
                {"id": row["id"]},
            )
        return [
            Version(
                one["number"],
                one["rows"],
                one["classes"],
                one["created"],
                one["report"],
                active=one["number"] == row["active"],
                trained=(_folder(request, one["number"]) / "model.safetensors").exists(),
            )
            for one in found
        ]

    return as_json({"versions": await service.call(read)})


async def activate(request: Request) -> Response:
    """POST …/versions/{n}/activate"""
    service, tenant = service_of(request), tenant_of_request(request)
    number = request.path_params["number"]

    def change() -> None:
        values = {"id": request.path_params["id"], "number": number}
        with service.database.transaction() as transaction:
            classifiers.find(transaction, tenant, request.path_params["id"])
            kept = transaction.one(
                "SELECT number FROM versions WHERE classifier = :id AND number = :number", values
            )
            model = _folder(request, number) / "model.safetensors"
            if kept is None or service.models.damage(model) is not None:
                raise not_found(f"There is no trained version {number}.")
            transaction.run("UPDATE classifiers SET active = :number WHERE id = :id", values)

    if not 0 < number < 2**31:
        raise not_found(f"There is no trained version {number}.")
    await service.call(change)
    return as_json(Changed(number))


# ---- files


def _folder(request: Request, number: int) -> Path:
    return service_of(request).directory.version(request.path_params["id"], number)


async def _file(request: Request, name: str, *, newest: bool = False) -> Path:
    """A file of the active version, or of the newest."""
    row, job, _ = await service_of(request).call(_newest, request)
    number = job["version"] if newest or row["active"] is None else row["active"]
    path = _folder(request, number) / name
    if not path.is_file():
        raise not_found(f"There is no {name} yet.")
    return path


async def data(request: Request) -> Response:
    """GET …/data: the CSV as it was sent"""
    path = await _file(request, "data.csv")
    return FileResponse(path, media_type="text/csv", filename="data.csv")


async def model(request: Request) -> Response:
    """GET …/model"""
    path = await _file(request, "model.safetensors")
    return FileResponse(path, media_type="application/octet-stream", filename="model.safetensors")


async def report(request: Request) -> Response:
    """GET …/report"""
    path = await _file(request, "report.json")
    return FileResponse(path, media_type="application/json")


async def report_csv(request: Request) -> Response:
    """GET …/report.csv: the figures of each class"""
    path = await _file(request, "report.json")
    found = msgspec.json.decode(path.read_bytes())
    rows = found.get("per_class") or []
    out = io.StringIO()
    writer = csv.writer(out)
    names = list(rows[0]) if rows else ["class"]
    writer.writerow(names)
    writer.writerows([safe_cell(row.get(name)) for name in names] for row in rows)
    headers = {"Content-Disposition": 'attachment; filename="report.csv"'}
    return Response(out.getvalue().encode(), media_type="text/csv", headers=headers)


def safe_cell(value: object) -> object:
    """A cell that no spreadsheet takes for a formula.

    >>> safe_cell("=cmd"), safe_cell("a=b"), safe_cell(-1.5)
    ("'=cmd", 'a=b', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


async def log(request: Request) -> Response:
    """GET …/log: the last 64 KiB, or all of it"""
    path = await _file(request, "train.log", newest=True)
    if request.query_params.get("all") == "1":
        return FileResponse(path, media_type="text/plain; charset=utf-8")
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_NBYTES))
        return Response(file.read(LOG_NBYTES), media_type="text/plain; charset=utf-8")


# ---- health and page


async def livez(request: Request) -> Response:
    """GET /livez"""
    return as_json({"live": True})


async def readyz(request: Request) -> Response:
    """GET /readyz: database, disk, trainer"""
    service = service_of(request)

    def database_answers() -> bool:
        try:
            with service.database.transaction() as transaction:
                transaction.run("DELETE FROM purges WHERE at < 0")
        except DatabaseUnavailable:
            return False
        return True

    well = {
        "database": await service.call(database_answers),
        "disk": service.directory.free_nbytes() >= FREE_NBYTES,
        "trainer": service.trainer_beat() < WELL_S,
        "running": not service.stopping.is_set(),
    }
    ready = all(well.values())
    answer = as_json({"ready": ready, **well, "at": int(time.time())}, 200 if ready else 503)
    if not ready:
        answer.headers["Retry-After"] = "5"
    return answer


async def page(request: Request) -> Response:
    """GET / and its two files"""
    name = request.path_params.get("file", "index.html")
    file = resources.files("slipstream.service") / "page" / name
    if name not in PAGE_TYPES or not file.is_file():
        raise not_found(f"There is nothing at {request.method} {request.url.path[:200]!r}.")
    headers = {
        "Content-Security-Policy": CSP,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",  # no other page may lay a button of its own over ours
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(file.read_bytes(), media_type=PAGE_TYPES[name], headers=headers)
