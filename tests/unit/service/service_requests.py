"""Requests to the application of a service, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from slipstream.apps.service.app import Gate
from slipstream.apps.service.context import Service
from slipstream.apps.service.serve import prepare, recover
from slipstream.apps.service.serve_options import ServeOptions

LIMIT_S = 20


@dataclass(frozen=True)
class Answer:
    code: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@contextlib.contextmanager
def prepared(data: Path, **options: Any) -> Iterator[Service]:
    """The parts of a service; no process is started."""
    mask = os.umask(0o077)
    try:
        with contextlib.closing(prepare(ServeOptions(data=str(data), **options))) as service:
            recover(service)
            yield service
    finally:
        os.umask(mask)


def ask(service: Service, line: str, body: bytes = b"", **headers: str) -> Answer:
    """The answer to a request such as ``"GET /livez"``; the header ``a_b`` is sent as a-b."""
    return asyncio.run(asyncio.wait_for(answer_to(service, line, body, **headers), LIMIT_S))


async def answer_to(service: Service, line: str, body: bytes = b"", **headers: str) -> Answer:
    """The same within an event loop, for several requests at once."""
    method, _, target = line.partition(" ")
    path, _, query = target.partition("?")
    given = {"host": "localhost", **headers}
    sent: list[Any] = []
    blocks = [body]

    async def receive() -> Any:
        if not blocks:
            await asyncio.Event().wait()  # the client stays
        return {"type": "http.request", "body": blocks.pop()}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "query_string": query.encode(),
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in given.items()],
    }
    await Gate(service)(scope, receive, send)
    head = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return Answer(sent[0]["status"], head, content)
