"""The protocol of connections, fed by hand: after an answer a bounded rest of the body is read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from slipstream.apps.service.deadlines import CHECK_S, REST_NBYTES, REST_S, DeadlineProtocol

HEAD = b"POST /nope HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
CHUNK = b"10000\r\n" + b"x" * 65536 + b"\r\n"
KEEP_ALIVE_S = 65


class Clock:
    """A loop whose time is set by the test; tasks run on the real one."""

    def __init__(self) -> None:
        self.now, self._due = 0.0, list[tuple[float, Any, Callable[[], None]]]()

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, act: Callable[[], None]) -> asyncio.Handle:
        handle = asyncio.Handle(act, (), asyncio.get_running_loop())
        self._due.append((self.now + delay_s, handle, act))
        return handle

    def create_task(self, work: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [one for one in self._due if one[0] <= until and not one[1].cancelled()]:
            first = min(due, key=lambda one: one[0])
            self._due.remove(first)
            self.now = max(self.now, first[0])
            first[2]()
        self.now = until


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.paused, self.ended, self.closed = b"", False, False, False
        self.aborted, self.unsent = False, 0

    def write(self, data: Any) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = self.closed = True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


async def answer_at_once(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"2"), *(h for h in scope["headers"] if h[0] == b"connection")]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": b"no"})


class Connection:
    def __init__(self, clock: Clock | None = None, state: ServerState | None = None) -> None:
        self.clock, self.wire = clock or Clock(), Wire()
        config = Config(answer_at_once, timeout_keep_alive=KEEP_ALIVE_S, log_config=None, ws="none")
        state = state or ServerState()
        self.protocol = DeadlineProtocol(config, state, {}, self.clock)  # type: ignore[arg-type]
        self.protocol.connection_made(self.wire)

    async def send(self, data: bytes) -> None:
        self.protocol.data_received(data)
        for _ in range(9):  # the application runs
            await asyncio.sleep(0)

    async def send_without_end(self) -> int:
        """How many bytes are taken; the last block may exceed the limit."""
        sent = 0
        while not (self.wire.paused or self.wire.closed) and sent < 9 * REST_NBYTES:
            await self.send(CHUNK)
            sent += len(CHUNK)
        return sent


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
def test_a_body_without_end_after_its_answer(more: bytes) -> None:
    async def run() -> None:
        one = Connection()
        await one.send(HEAD + more + b"\r\n")
        assert one.wire.sent.startswith(b"HTTP/1.1 404")
        assert await one.send_without_end() <= REST_NBYTES + len(CHUNK)
        assert one.wire.ended  # the client may read to the end of the answer, while it still sends
        assert not one.wire.closed
        one.clock.pass_time(REST_S + CHECK_S)
        assert one.wire.closed
        assert one.wire.sent.count(b"HTTP/1.1") == 1

    asyncio.run(run())


def test_a_body_that_stops_after_its_answer() -> None:
    async def run() -> None:
        one = Connection()
        await one.send(HEAD + b"\r\n" + CHUNK)
        one.clock.pass_time(REST_S + CHECK_S)
        assert one.wire.closed
        assert one.wire.sent.count(b"HTTP/1.1") == 1

    asyncio.run(run())


def test_a_connection_is_kept_if_the_body_comes_after_its_answer() -> None:
    async def run() -> None:
        one = Connection()
        for count in (1, 2):
            await one.send(HEAD + b"\r\n")
            await one.send(CHUNK + b"0\r\n\r\n")
            one.clock.pass_time(REST_S + CHECK_S)
            assert not one.wire.closed
            assert one.wire.sent.count(b"HTTP/1.1 404") == count
        one.clock.pass_time(KEEP_ALIVE_S)
        assert one.wire.closed

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET /?text=\xc3\xbc HTTP/1.1\r\nHost: a\r\n\r\n", "illegal request line"),
        (b"GET / HTTP/1.1\r\n\r\n", "Missing mandatory Host"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "multiple Host"),
        (HEAD + b"\r\nno chunk\r\n", "illegal chunk header"),
    ],
)
def test_what_is_no_http(sent: bytes, said: str) -> None:
    async def run() -> None:
        one = Connection()
        one.protocol.data_received(sent)
        head, _, body = one.wire.sent.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert b"X-Global-Transaction-Id: " in head
        found = json.loads(body)
        assert (found["code"], found["error"]) == (400, "Malformed request")
        assert said in found["description"]
        assert one.wire.closed

    asyncio.run(run())
