"""Our own API, ``/api``: progress, events, report, log, downloads, versions."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from slipstream.service import classifiers, queue
from slipstream.service.context import Call
from slipstream.service.data_directory import MODEL, remove
from slipstream.service.database import Row, now_ms
from slipstream.service.errors import ApiError, not_found
from slipstream.service.upload import received

LOG_NBYTES: Final = 64 * 1024
EVENTS_S: Final = 1.0
COMMENT_S: Final = 15.0
FILES: Final = {  # by the end of the path: name, type, and the name if it is to be saved
    "data": ("data.csv", "text/csv", "data.csv"),
    "model": (MODEL, "application/octet-stream", MODEL),
    "report": ("report.json", "application/json", None),
}
RANGE_ERRORS: Final = {
    400: ("Malformed range", "The header Range is not of the form bytes=FIRST-LAST."),
    416: ("Range not satisfiable", "The file has no such bytes."),
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


class Versions(msgspec.Struct, frozen=True):
    """The versions of a classifier, newest first."""

    versions: list[Version]


class Changed(msgspec.Struct, frozen=True):
    """The version that a request was about."""

    version: int


# ---- jobs


def show(call: Call) -> JobState:
    """How far the newest job is."""
    job = classifiers.find_job(call)
    ahead = queue.ahead(call.service.database, job)
    now = {"ahead": ahead, "percent": queue.percent(job), "eta_s": queue.seconds_left(job)}
    return msgspec.convert({**job, **now}, JobState)


def events(call: Call) -> Response:
    """Follow a job: server-sent events ``progress``, ``epoch`` and ``end``."""
    after = _whole_number(call.headers.get("last-event-id", ""), -1)
    job = classifiers.find_job(call)["id"]
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if call.method == "HEAD":  # there is no body to wait for
        return StreamingResponse([], 200, headers, "text/event-stream")
    return StreamingResponse(_follow(call, job, after), 200, headers, "text/event-stream")


def _whole_number(text: str, otherwise: int) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else otherwise


def event(name: str, data: object, number: int | None = None) -> bytes:
    """One event on the wire.

    >>> event("epoch", {"loss": 0.5}, 3)
    b'id: 3\\nevent: epoch\\ndata: {"loss":0.5}\\n\\n'
    """
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


async def _follow(call: Call, job: str, after: int) -> AsyncIterator[bytes]:
    """The events after an epoch, until the job or the service ends; comments while none happens."""

    def news() -> tuple[list[Row], JobState | None]:
        try:
            state = show(call)  # first: of a job that is over, all epochs are sent
        except ApiError:  # deleted
            return [], None
        # An epoch that is not over may get its held-out accuracy still.
        epochs = call.service.database.run(
            "SELECT e.epoch, e.at, e.loss, e.accuracy, e.held_accuracy"
            " FROM epochs e JOIN jobs j ON j.id = e.job WHERE j.id = :job AND e.epoch > :after"
            " AND (e.epoch < j.epoch OR j.state NOT IN ('waiting', 'running')) ORDER BY e.epoch",
            job=job,
            after=after,
        )
        return epochs, state

    stopping, before, sent_at = call.service.stopping, None, time.monotonic()
    yield b": begin\n\n"
    while not stopping.is_set():
        epochs, state = await asyncio.to_thread(news)
        for row in epochs:
            after = row["epoch"]
            yield event("epoch", row, after)
        if state != before:
            before, sent_at = state, time.monotonic()
            yield event("progress", state)
        if state is None or state.state in ("done", "failed", "cancelled"):
            yield event("end", state)
            return
        if time.monotonic() - sent_at > COMMENT_S:
            sent_at = time.monotonic()
            yield b": alive\n\n"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), EVENTS_S)


def cancel(call: Call) -> JobState:
    """Stop a job; also if it is over."""
    with call.service.database.transaction() as database:
        queue.cancel(database, classifiers.find_job(call)["classifier"], now_ms())
    return show(call)


def retry(call: Call) -> JobState:
    """Train again on the same data, after a job that failed."""
    with call.service.database.transaction() as database:
        job = classifiers.find_job(call)
        if job["state"] not in ("failed", "cancelled"):
            raise ApiError("Classifier not available", "Only what failed can be retried.")
        remove(_folder(call, job["version"]) / "checkpoints")
        earlier = "DELETE FROM jobs WHERE classifier = :id AND version = :version"
        database.run(earlier, id=call.id, version=job["version"])
        classifiers.enqueue(call, call.id, job["version"], now_ms())
    return show(call)


# ---- versions


async def put_data(call: Call) -> Changed:
    """Train version n + 1 under the same id; version n answers meanwhile."""
    async with received(call) as upload:
        loop, checking = asyncio.get_running_loop(), call.service.checking
        adding = loop.run_in_executor(checking, classifiers.add_version, call, upload)
        return Changed(await adding)


def versions(call: Call) -> Versions:
    """The versions that are kept, newest first."""
    classifiers.find_job(call)
    found = call.service.database.run(
        "SELECT number, v.rows, v.classes, v.created, report AS accuracy, active FROM versions v"
        " JOIN classifiers c ON c.id = v.classifier WHERE c.id = :id ORDER BY number DESC",
        id=call.id,
    )
    for row in found:
        row["active"] = row["number"] == row["active"]
        row["trained"] = (_folder(call, row["number"]) / MODEL).exists()
    return msgspec.convert({"versions": found}, Versions)


def activate(call: Call) -> Changed:
    """Let another version answer."""
    classifiers.find_job(call)
    given, database = call.path_params["number"], call.service.database
    number = _whole_number(given, 0)
    # Outside of a transaction, for which others would wait: a large model takes long to load.
    damage = call.service.models.damage(_folder(call, number) / MODEL)
    change = (
        "UPDATE classifiers SET active = :number WHERE id = :id AND EXISTS"
        " (SELECT 1 FROM versions WHERE classifier = :id AND number = :number) RETURNING id"
    )
    with database.transaction():
        if database.postgres:  # the trainer may remove the version while the update waits for it
            database.run("SELECT id FROM classifiers WHERE id = :id FOR UPDATE", id=call.id)
        if damage or not database.run(change, id=call.id, number=number):
            raise not_found(f"There is no trained version {given[:20]}.")
    return Changed(number)


# ---- files


def _folder(call: Call, number: int) -> Path:
    return call.service.directory.version(call.id, number)


def _file(call: Call, name: str) -> Path:
    """A file of the active version; the log, of the newest."""
    job = classifiers.find_job(call)
    newest = name == "train.log" or job["active"] is None
    path = _folder(call, job["version"] if newest else job["active"]) / name
    if not path.is_file():
        raise not_found(f"There is no {name} yet.")
    return path


@contextlib.contextmanager
def _unless_deleted(error: type[Exception] = FileNotFoundError) -> Iterator[None]:
    """Answer 404 for a file that is deleted after ``_file`` has seen it."""
    try:
        yield
    except error:
        raise not_found("The file was deleted meanwhile.") from None


class Download(FileResponse):
    """A file; 404 if it is deleted before the answer begins."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_file(message: Message) -> None:
            if message.get("status") in RANGE_ERRORS:  # a plain text of Starlette
                headers = dict(message["headers"])
                size = headers.get(b"content-range", b"").decode()
                raise ApiError(
                    *RANGE_ERRORS[message["status"]], **({"Content-Range": size} if size else {})
                )
            await send(message)

        with _unless_deleted(RuntimeError):  # Starlette's own
            await super().__call__(scope, receive, send_file)


def download(call: Call) -> Response:
    """The data as it was sent, the model file, or the report on held-out rows."""
    name, kind, shown_as = FILES[call.route.rpartition("/")[2]]
    return Download(_file(call, name), media_type=kind, filename=shown_as)


def report_csv(call: Call) -> Response:
    """The report's figures of each class."""
    path = _file(call, "report.json")
    with _unless_deleted():
        rows = msgspec.json.decode(path.read_bytes()).get("per_class") or []
    names = list(rows[0]) if rows else ["class"]
    out = io.StringIO()
    writer = csv.writer(out)
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


def log(call: Call) -> Response:
    """The log of the newest job: its last 64 KiB, or all of it with ``?all=1``."""
    path = _file(call, "train.log")
    with _unless_deleted():
        file = path.open("rb")
    if call.query_params.get("all") != "1":
        file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_NBYTES))
    if call.method == "HEAD":
        file.seek(0, os.SEEK_END)  # there is no body to read
    # Not as a file of a known length: it may grow while it is sent.
    return StreamingResponse(_blocks(file), media_type="text/plain; charset=utf-8")


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while block := file.read(LOG_NBYTES):
            yield block
