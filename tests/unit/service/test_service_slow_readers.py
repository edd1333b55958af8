"""Clients that take their answers slowly or not at all: when they end, and who makes room."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from test_service_connections import HEAD, Clock, Connection
from uvicorn.server import ServerState

from slipstream.apps.service.deadlines import (
    ANSWER_NBYTES_S,
    CHECK_S,
    LAG_FULL_S,
    LAG_S,
    DeadlineProtocol,
    _unconfirmed,
)

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
LARGE = 1 << 30
HOUR_S = 3600


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*given: Any, **named: Any) -> None:
        asyncio.run(test(*given, **named))

    return run


async def asked(sent: bytes = GET, **where: Any) -> Connection:
    """A connection whose answer waits."""
    one = Connection(**where)
    await one.send(sent)
    write(one, LARGE)
    return one


def write(one: Connection, nbytes: int) -> None:
    """Bytes that wait in the transport, without their memory."""
    one.wire.unsent += nbytes
    one.protocol._watched._written += nbytes


def take(one: Connection, nbytes: int, every_s: float, for_s: float = HOUR_S) -> float:
    """The client takes so many bytes every so many seconds; returns when it is cut off."""
    began = one.clock.now
    while one.clock.now < began + for_s and not one.wire.aborted:
        one.clock.pass_time(every_s)
        one.wire.unsent -= nbytes
    return one.clock.now - began


@in_a_loop
async def test_an_answer_that_is_not_read() -> None:
    one = await asked()
    one.clock.pass_time(LAG_S - CHECK_S)
    assert not one.wire.closed
    one.clock.pass_time(2 * CHECK_S)
    assert one.wire.aborted


@in_a_loop
async def test_the_last_answer_of_a_connection_is_not_read() -> None:
    """A transport that was closed waits for ever until its last bytes have left."""
    one = await asked(LAST)
    assert one.wire.closed
    one.clock.pass_time(LAG_S - CHECK_S)
    assert not one.wire.aborted
    one.clock.pass_time(2 * CHECK_S)
    assert one.wire.aborted


@pytest.mark.parametrize(("nbytes", "every_s"), [(1, 1), (1, 19), (1024, 1), (16 * 1024, 10)])
@in_a_loop
async def test_an_answer_that_is_read_too_slowly(nbytes: int, every_s: float) -> None:
    one = await asked()
    assert nbytes / every_s < ANSWER_NBYTES_S
    assert take(one, nbytes, every_s) < 3 * LAG_S


@pytest.mark.parametrize("nbytes_s", [ANSWER_NBYTES_S + 1, 16 * 1024, 64 * 1024])
@pytest.mark.parametrize("step_nbytes", [1, 64 * 1024])  # at a time
@in_a_loop
async def test_an_answer_that_is_read_fast_enough(nbytes_s: int, step_nbytes: int) -> None:
    one = await asked()
    every_s = max(step_nbytes / nbytes_s, 1.0)
    take(one, round(nbytes_s * every_s), every_s)
    assert not one.wire.aborted


@in_a_loop
async def test_a_fast_start_is_no_credit() -> None:
    one = await asked()
    take(one, 1 << 20, 1.0, 600)
    assert not one.wire.aborted
    assert take(one, 1, 1.0) < LAG_S + 3 * CHECK_S


@in_a_loop
async def test_only_while_bytes_wait() -> None:
    one = await asked()
    for _ in range(9):
        one.clock.pass_time(LAG_S - CHECK_S)
        one.wire.unsent = 0
        one.clock.pass_time(CHECK_S)
        await one.send(GET)
        write(one, 1)
    assert not one.wire.aborted


@in_a_loop
async def test_a_pause_of_the_service_is_not_the_clients() -> None:
    one = await asked()
    one.clock.now += 10 * LAG_S  # no check ran
    one.clock.pass_time(LAG_S / 2)
    assert not one.wire.aborted


@in_a_loop
async def test_a_client_that_reads_what_the_kernel_holds_is_not_one_that_does_not_read() -> None:
    one = await asked()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(bytes(8 * 1024))
        one.wire._extra["socket"] = ours
        one.protocol._watched._written += _unconfirmed(one.wire)
        one.clock.pass_time(LAG_S - CHECK_S)
        theirs.recv(8 * 1024)
        one.clock.pass_time(2 * CHECK_S)
        assert not one.wire.closed
        one.clock.pass_time(2 * CHECK_S)
        assert one.wire.aborted


# ---- who makes room


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Where two connections are too many for a third."""
    monkeypatch.setattr(DeadlineProtocol, "limit", 2)
    return {"clock": Clock(), "state": ServerState()}


@pytest.mark.parametrize("sent", [GET, LAST])
@in_a_loop
async def test_an_idle_connection_makes_room_before_a_slow_reader(
    sent: bytes, full: dict[str, Any]
) -> None:
    unread, idle = await asked(sent, **full), Connection(**full)
    full["clock"].pass_time(LAG_FULL_S + CHECK_S)
    third = Connection(**full)
    assert (unread.wire.aborted, idle.wire.closed, third.wire.closed) == (False, True, False)


@pytest.mark.parametrize("sent", [GET, LAST])
@in_a_loop
async def test_the_slowest_reader_makes_room(sent: bytes, full: dict[str, Any]) -> None:
    slow, slower = await asked(sent, **full), await asked(sent, **full)
    for _ in range(int(2 * LAG_FULL_S)):
        full["clock"].pass_time(1.0)
        slow.wire.unsent -= ANSWER_NBYTES_S // 4
    more = [await asked(**full)]
    assert (slow.wire.aborted, slower.wire.aborted) == (False, True)
    more.append(await asked(**full))
    assert slow.wire.aborted
    assert not any(one.wire.closed for one in more)


@in_a_loop
async def test_who_reads_or_sends_does_not_make_room(full: dict[str, Any]) -> None:
    reads, sends = await asked(**full), Connection(**full)
    await sends.send(HEAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: 9") + b"\r\n")
    for _ in range(2):
        full["clock"].pass_time(4.0)  # 16 KiB/s, in steps
        reads.wire.unsent -= 64 * 1024
    third = Connection(**full)
    assert third.wire.sent.startswith(b"HTTP/1.1 503")
    assert (reads.wire.closed, third.wire.closed) == (False, True)
