"""What is received: wrapped parts, gzip bodies, and a disk that is full."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.apps.service import upload
from slipstream.apps.service.context import Call
from slipstream.apps.service.errors import ApiError

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
    with pytest.raises(ApiError, match=r"Malformed data.*send a file, a stream or a Buffer"):
        receive(tmp_path, large)
    assert list(tmp_path.iterdir()) == []
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_gzip_body_that_goes_on(size: int) -> None:
    """As if the rest were not there, a part of the data would be trained on."""

    def read(body: bytes) -> bytes:
        blocks = [body[start : start + size] for start in range(0, len(body), size)]

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": blocks.pop(0), "more_body": bool(blocks)}

        head = [(b"content-encoding", b"gzip")]
        return asyncio.run(upload.read_body(Call({"type": "http", "headers": head}, receive)))

    whole = gzip.compress(b"one")
    assert read(whole) == b"one"
    for more in (gzip.compress(b"two"), b"x"):
        with pytest.raises(ApiError, match="goes on after its end"):
            read(whole + more)


def test_a_full_disk_keeps_nothing(tmp_path: Path) -> None:
    received = upload.Upload(tmp_path, b"b")
    received._file.close()
    received._file = open("/dev/full", "wb")  # noqa: SIM115 (closing it fails)
    received._file.write(b"rows")
    received.close()
    assert not list(tmp_path.iterdir())


def test_a_cancelled_upload_is_kept_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may still move it into place when its request is cancelled."""
    received, place = upload.Upload(tmp_path, b"b"), tmp_path / "place"
    remove, late = upload.remove, []

    def remove_late(path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            received.directory.rename(place)
        late.append(path)
        remove(path)

    monkeypatch.setattr(upload, "remove", remove_late)
    received.close()
    assert late
    assert not list(tmp_path.iterdir())

    monkeypatch.setattr(upload, "remove", remove)
    received = upload.Upload(tmp_path, b"b")
    received.directory.rename(place)
    received.close()
    assert [path.name for path in place.iterdir()] == ["data.csv"]
