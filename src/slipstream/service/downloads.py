"""Our own API, ``/api``: downloads of a classifier's data, model, report and training log."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from slipstream.service import classifiers
from slipstream.service.context import Call
from slipstream.service.data_directory import MODEL
from slipstream.service.errors import ApiError, not_found

LOG_NBYTES: Final = 64 * 1024
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


def _file(call: Call, name: str) -> Path:
    """A file of the active version; the log, of the newest."""
    job = classifiers.find_job(call)
    newest = name == "train.log" or job["active"] is None
    path = call.version_folder(job["version"] if newest else job["active"]) / name
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
        head: list[Message] = []  # sent with the body's first part, when the file is open

        async def send_file(message: Message) -> None:
            if message.get("status") in RANGE_ERRORS:  # a plain text of Starlette
                headers = dict(message["headers"])
                size = headers.get(b"content-range", b"").decode()
                raise ApiError(
                    *RANGE_ERRORS[message["status"]], **({"Content-Range": size} if size else {})
                )
            if message["type"] == "http.response.start":
                head.append(message)
                return
            while head:
                await send(head.pop())
            await send(message)

        with _unless_deleted(RuntimeError), _unless_deleted():  # Starlette's own; when opened
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
