"""Our own API, ``/api``: progress, events, cancel and retry, versions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from slipstream.apps.service import classifiers, queue
from slipstream.apps.service.context import Call
from slipstream.apps.service.data_directory import MODEL, remove
from slipstream.apps.service.database import Row, now_ms
from slipstream.apps.service.errors import ApiError, not_found
from slipstream.apps.service.phases import phase_of
from slipstream.apps.service.upload import received

EVENTS_S: Final = 1.0
COMMENT_S: Final = 15.0
STREAMS: Final = 64  # of events, for a tenant, if there are connections for more tenants
TENANTS: Final = 8  # that can have all their streams; each stream keeps a connection


class JobState(msgspec.Struct, frozen=True):
    """The newest job of a classifier.

    Attributes:
        epoch: The passes over the data that are complete.
        epochs: The passes that it makes: fewer than the most, once it is known to stop early.
        eta_s: An estimate of the seconds left, if it makes all of ``epochs``.
        phase: What it does now, see ``phases``; null if it is over.
        phase_percent: How much of the phase is done, where that is known.
        resumed_epoch: The epoch that the job continued from when it was started again.
        may_stop_early: Whether it may still turn out that it makes fewer epochs.
        stops_early: Why it makes fewer epochs, once that is decided.
        accuracy: The report's.
    """

    state: str
    phase: str | None
    phase_percent: int | None
    resumed_epoch: int | None
    may_stop_early: bool
    stops_early: str | None
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
    cut: int
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
    phase = phase_of(job["state"], call.version_folder(job["version"]))
    return msgspec.convert({**job, **now, **msgspec.structs.asdict(phase)}, JobState)


def events(call: Call) -> Response:
    """Follow a job: server-sent events ``progress``, ``epoch`` and ``end``."""
    after = _whole_number(call.headers.get("last-event-id", ""), -1)
    job = classifiers.find_job(call)["id"]
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if call.method == "HEAD":  # there is no body to wait for
        return StreamingResponse([], 200, headers, "text/event-stream")
    return EventStream(_follow(call, job, after), 200, headers, "text/event-stream", call=call)


def most_streams(connections: int) -> int:
    """How many streams of events a tenant may have open, of so many connections.

    >>> most_streams(512), most_streams(8)
    (64, 1)
    """
    return max(min(STREAMS, connections // TENANTS), 1)


class EventStream(StreamingResponse):
    """An answer of server-sent events; 429 if its tenant has too many of them open.

    The open streams of a tenant are counted when the answer begins, not when the request is
    handled. Requests are handled in threads: of several at once, each would see a free place.
    Answers begin in the event loop, one after the other.
    """

    def __init__(self, *given: Any, call: Call) -> None:
        super().__init__(*given)
        self._streams, self._tenant = call.service.streams, call.tenant.id
        self._most = most_streams(call.service.options.connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._streams[self._tenant] >= self._most:
            reason = f"{self._most} of your streams of events are open already; close some."
            raise ApiError("Too many requests", reason, retry_s=30)
        self._streams[self._tenant] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams[self._tenant] -= 1


def _whole_number(text: str, otherwise: int) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else otherwise


def event(name: str, data: object, number: int | None = None) -> bytes:
    """One event on the wire.

    >>> event("epoch", {"loss": 0.5}, 3)
    b'id: 3\\nevent: epoch\\ndata: {"loss":0.5}\\n\\n'
    """
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


async def _follow(call: Call, job: str, after: int) -> AsyncGenerator[bytes]:
    """The events of a job, as bytes, until the job ends.

    Epochs up to ``after`` are left out. A comment is sent if there was no progress for
    ``COMMENT_S``, so that proxies keep the connection open.

    The stream also ends when the service stops, the caller's key is revoked or the caller's token
    expires. In these cases there is no event ``end``, so a client connects again; without a valid
    key it then gets 401.
    """

    def is_admitted() -> bool:
        return call.service.tenant(call.key_hash()) is not None

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
    while not stopping.is_set() and await asyncio.to_thread(is_admitted):
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
    """Train again on the same data, after a job that failed or was cancelled."""
    with call.service.database.transaction() as database:
        job = classifiers.find_job(call)
        if job["state"] not in ("failed", "cancelled"):
            raise ApiError(
                "Classifier not available", "Only what failed or was cancelled can be retried."
            )
        for name in ("checkpoints", "report.json"):  # learners wait for a new report
            remove(call.version_folder(job["version"]) / name)
        earlier = "DELETE FROM jobs WHERE classifier = :id AND version = :version"
        database.run(earlier, id=call.id, version=job["version"])
        classifiers.enqueue(call, call.id, job["version"], now_ms())
    return show(call)


# ---- versions


async def put_data(call: Call) -> Changed:
    """Train version n + 1 under the same id; version n answers meanwhile."""
    await asyncio.to_thread(classifiers.find_job, call)  # 404 before a large body is read
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
        row["trained"] = (call.version_folder(row["number"]) / MODEL).exists()
    return msgspec.convert({"versions": found}, Versions)


def activate(call: Call) -> Changed:
    """Let another version answer."""
    classifiers.find_job(call)
    given, database = call.path_params["number"], call.service.database
    number = _whole_number(given, 0)
    # Outside of a transaction, for which others would wait: a large model takes long to load.
    damage = call.service.models.damage(call.version_folder(number) / MODEL)
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
