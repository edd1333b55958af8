"""Our own API, ``/api``: downloads of a classifier's data, model, report and training log."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import quote

import msgspec
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from slipstream.apps.service import classifiers
from slipstream.apps.service.context import Call
from slipstream.apps.service.data_directory import MODEL
from slipstream.apps.service.database import Row
from slipstream.apps.service.errors import ApiError, not_found

LOG_NBYTES: Final = 64 * 1024
FILES: Final = {  # by the end of the path: name, type, and whether it is saved or shown
    "data": ("data.csv", "text/csv", "attachment"),
    "model": (MODEL, "application/octet-stream", "attachment"),
    "report": ("report.json", "application/json", "inline"),
}
UNSAFE: Final = re.compile(r"[^\w.()+-]+")  # in names of files, here or on other systems
MOST_NAME: Final = 50  # characters of a classifier's name; in UTF-8 with the rest, below 255 bytes
RANGE_ERRORS: Final = {
    400: ("Malformed range", "The header Range is not of the form bytes=FIRST-LAST."),
    416: ("Range not satisfiable", "The file has no such bytes."),
}
FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def _file(call: Call, name: str) -> tuple[Path, Row]:
    """A file of the active version (the log, of the newest), and the classifier's job."""
    job = classifiers.find_job(call)
    newest = name == "train.log" or job["active"] is None
    path = call.version_folder(job["version"] if newest else job["active"]) / name
    if not path.is_file():
        raise not_found(f"There is no {name} yet.")
    return path, job


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


def data(call: Call) -> Response:
    """The training data as it was sent."""
    return _download(call)


def model(call: Call) -> Response:
    """The model file, which answers without the service: ``slipstream predict FILE``."""
    return _download(call)


def report(call: Call) -> Response:
    """The report: how good the classifier is on held-out rows."""
    return _download(call)


def _download(call: Call) -> Response:
    name, kind, use = FILES[call.route.rpartition("/")[2]]
    path, job = _file(call, name)
    headers = {"Content-Disposition": f"{use}; {_names(job, name)}"}
    return Download(path, media_type=kind, headers=headers)


def _names(job: Row, file: str) -> str:
    return file_names(job["name"], job["classifier"], file)


def file_names(name: str | None, otherwise: str, file: str) -> str:
    """The names under which a file is saved, as parameters of Content-Disposition (RFC 6266).

    They begin with the classifier's name; where nothing of it is left, with its id. The first is
    ASCII, for old clients; the second, if it differs, is what others use (RFC 5987).

    >>> file_names("Trips / 2024", "id", "data.csv")
    'filename="Trips_2024-data.csv"'
    >>> print(file_names("Café", "id", "data.csv"))
    filename="Cafe-data.csv"; filename*=UTF-8''Caf%C3%A9-data.csv
    """
    composed, decomposed = (unicodedata.normalize(form, name or "") for form in ("NFC", "NFKD"))
    old = _safe(decomposed.encode("ascii", "ignore").decode()) or otherwise
    new = _safe(composed) or otherwise
    names = f'filename="{old}-{file}"'
    return names if new == old else f"{names}; filename*=UTF-8''{quote(f'{new}-{file}', safe='')}"


def _safe(name: str) -> str:
    return UNSAFE.sub("_", name).strip("_.-")[:MOST_NAME]


def report_csv(call: Call) -> Response:
    """The report's figures of each class."""
    path, job = _file(call, "report.json")
    with _unless_deleted():
        rows = msgspec.json.decode(path.read_bytes()).get("per_class") or []
    names = list(rows[0]) if rows else ["class"]
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(names)
    writer.writerows([safe_cell(row.get(name)) for name in names] for row in rows)
    headers = {"Content-Disposition": f"attachment; {_names(job, 'report.csv')}"}
    return Response(out.getvalue().encode(), media_type="text/csv", headers=headers)


def safe_cell(value: object) -> object:
    """A cell that no spreadsheet takes for a formula.

    >>> safe_cell("=cmd"), safe_cell("a=b"), safe_cell(-1.5)
    ("'=cmd", 'a=b', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def log(call: Call) -> Response:
    """The log of the newest job: its last 64 KiB, or all of it with ``?all=1``."""
    path, _ = _file(call, "train.log")
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
