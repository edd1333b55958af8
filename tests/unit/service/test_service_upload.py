"""Parts that a Node client wrapped in JSON are unwrapped, beside the event loop and bounded."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.service import upload
from slipstream.service.context import Call

PART = '--b\r\nContent-Disposition: form-data; name="training_{}"\r\n\r\n{}\r\n'


def receive(incoming: Path, data: str) -> bytes:
    body = f"{PART.format('metadata', '{}')}{PART.format('data', data)}--b--\r\n".encode()
    head = [(b"content-type", b"multipart/form-data; boundary=b")]

    async def send() -> dict[str, object]:
        return {"type": "http.request", "body": body}

    async def run() -> bytes:
        call = Call({"type": "http", "headers": head}, send)
        call.service = SimpleNamespace(  # type: ignore[assignment]
            directory=SimpleNamespace(incoming=incoming), options=SimpleNamespace(max_body=1 << 30)
        )
        async with upload.received(call) as received:
            return received.path.read_bytes()

    return asyncio.run(run())


def test_wrapped_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unwrap, threads = upload.unwrap, set()

    def noted(part: bytes) -> bytes:
        threads.add(threading.current_thread())
        return unwrap(part)

    monkeypatch.setattr(upload, "unwrap", noted)
    monkeypatch.setattr(upload, "WRAPPED_NBYTES", 1000)
    small, large = (json.dumps({"data": "a,b\n" * count, "contentType": "c"}) for count in (9, 999))
    assert receive(tmp_path, small) == b"a,b\n" * 9
    assert receive(tmp_path, large) == large.encode()
    assert threading.main_thread() not in threads
