"""Connections with deadlines, which uvicorn does not have.

A connection that sends nothing, half a request or a byte now and then would stay open for ever. A
header has to be complete within 10 s. A body has to come at 16 KiB/s after its first 10 s.

An error is often answered before its body has come. If the connection were closed at once, a client
that still sends would get a reset instead of the answer. So it stays open for 3 s more, in which at
most 1 MiB is read.

A client that reads no answer, or a byte now and then, would keep its place, too, even if the
connection is to be closed afterwards. While bytes of an answer wait, a client has to take 4 KiB/s.
It may lag 20 s behind that; then it is disconnected. What it takes faster is no credit, or it could
stop for hours after a fast start. What the client's kernel has confirmed counts as taken. What our
kernel holds does not: that may be megabytes.

If there are more connections than permitted, the one that has waited longest without a request is
closed. If all have one, it is the one with the largest lag, if that is 5 s. Otherwise the new
connection gets 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import secrets
import sys
import termios
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, cast

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from slipstream.apps.service.errors import ApiError

LOG = logging.getLogger("slipstream.apps.service")
HEADER_S: Final = 10.0
HEADER_NBYTES: Final = 32 * 1024
HEADER_STEP_NBYTES: Final = 8 * 1024
BODY_GRACE_S: Final = 10.0
BODY_NBYTES_S: Final = 16 * 1024
CHECK_S: Final = 1.0
REST_S: Final = 3.0  # for the rest of a body whose answer is complete
REST_NBYTES: Final = 1024 * 1024
ANSWER_NBYTES_S: Final = 4 * 1024
LAG_S: Final = 20.0  # that a client may be behind this rate
# The same, if there are too many connections. A client's kernel may announce room in steps of
# 64 KiB: at 16 KiB/s, nothing is taken for 4 s.
LAG_FULL_S: Final = 5.0


def is_too_slow(received_nbytes: int, elapsed_s: float) -> bool:
    """Whether a body comes too slowly.

    >>> is_too_slow(0, 9.0), is_too_slow(1024, 11.0), is_too_slow(1 << 20, 60.0)
    (False, True, False)
    """
    return elapsed_s > BODY_GRACE_S and received_nbytes < BODY_NBYTES_S * (elapsed_s - BODY_GRACE_S)


class _Watched:
    """A transport that counts what is written, and is closed by a function instead."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self.close, self._written = transport, close, 0

    def write(self, data: bytes) -> None:
        self._written += len(data)
        self._transport.write(data)

    def unsent_and_taken(self) -> tuple[int, int]:
        """Bytes that wait here, and bytes that the client has confirmed."""
        unsent = self._transport.get_write_buffer_size()
        return unsent, self._written - unsent - _unconfirmed(self._transport)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _unconfirmed(transport: asyncio.Transport) -> int:
    """Bytes that the kernel holds until the client confirms them; 0 if it does not tell."""
    counted = bytes(4)
    if (socket := transport.get_extra_info("socket")) is not None:
        with contextlib.suppress(OSError):
            counted = fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, counted)
    return int.from_bytes(counted, sys.byteorder)


class DeadlineProtocol(H11Protocol):
    """Answers 408 to a request that does not come in time, and closes."""

    limit = 512  # connections at once
    _socket: asyncio.Transport
    _watched: _Watched
    _lingers = False  # nothing is sent any more; what comes is not used
    # When what is expected began: a header, its body, or the body's rest after the answer.
    _since: float | None = None
    _header_since = 0.0  # when the last header began
    _received = 0  # of the body; after the answer, of its rest
    _taken, _lag_s = 0, 0.0  # of answers: bytes, and how far the client is behind
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn closes at once after an answer with "Connection: close".
        self._socket, self._watched = transport, _Watched(transport, self._close)
        self.transport = cast("asyncio.Transport", self._watched)
        self._since = self._header_since = self.loop.time()
        self._timer = self.loop.call_later(CHECK_S, self._check)
        if len(self.connections) > self.limit:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._since is None:  # the next request on this connection
            self._since = self._header_since = self.loop.time()
        before, answered = self.conn.their_state, self._is_answered()
        self._received += len(data)
        if answered and self._received > REST_NBYTES:
            self._close()
            self.flow.pause_reading()
        if self._lingers:
            return
        while len(data) > HEADER_STEP_NBYTES and self.conn.their_state is h11.IDLE:
            # h11 looks at the size of a header only while it is incomplete.
            super().data_received(data[:HEADER_STEP_NBYTES])
            data = data[HEADER_STEP_NBYTES:]
        if self.conn.their_state is not h11.ERROR:
            super().data_received(data)
        if self.conn.their_state is h11.SEND_BODY:
            if before is h11.IDLE:
                self._since, self._received = self.loop.time(), 0
        elif self.conn.their_state is not h11.IDLE or before is not h11.IDLE:
            self._since = None  # the request is complete
        if answered and self.conn.their_state is h11.IDLE:
            # uvicorn ends this timer with the first data after an answer.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:
            self._since, self._received = self.loop.time(), 0
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; uvicorn calls this where it has caught h11's error."""
        reason = f"This is not valid HTTP: {str(sys.exception() or msg)[:200]}."
        self._refuse(ApiError("Malformed request", reason))

    def _is_answered(self) -> bool:
        """Whether the answer is complete and the body is not."""
        ours = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        return ours and self.conn.their_state is h11.SEND_BODY

    def _close(self) -> None:
        """Close; if the client still sends, after ``REST_S``, or when it has seen the answer."""
        if not self._is_answered():
            self._socket.close()
        elif not self._lingers:
            self._lingers, self._since, self._received = True, self.loop.time(), 0
            self._socket.write_eof()

    def _check(self) -> None:
        self._timer = self.loop.call_later(CHECK_S, self._check)
        self._measure_lag()
        if self._lag_s >= LAG_S:
            self._socket.abort()
            return
        # A transport that closes does so when its last answer has left.
        if self._socket.is_closing() or self._since is None:
            return
        elapsed_s = self.loop.time() - self._since
        if self._is_answered():
            if elapsed_s >= REST_S:
                self._socket.close()
            return
        if self.flow.read_paused:  # we are the slow ones
            self._since += CHECK_S
            elapsed_s -= CHECK_S
        in_header = self.conn.their_state is h11.IDLE
        if elapsed_s >= HEADER_S if in_header else is_too_slow(self._received, elapsed_s):
            reason = "The request did not come in time; send it again."
            self._refuse(ApiError("Request timeout", reason))

    def _measure_lag(self) -> None:
        """Once for every check: by the clock, a pause of this process would be the client's lag."""
        unsent, taken = self._watched.unsent_and_taken()
        lag_s = self._lag_s + CHECK_S - (taken - self._taken) / ANSWER_NBYTES_S
        self._taken, self._lag_s = taken, max(lag_s, 0.0) if unsent else 0.0

    def _is_idle(self) -> bool:
        """Whether no request has come and every answer has left."""
        unsent, _ = self._watched.unsent_and_taken()
        return self.conn.their_state is h11.IDLE and not unsent and not self._socket.is_closing()

    def _make_room(self) -> None:
        """Close an idle connection, or the one with the largest lag, or this one with 503."""
        others = [
            one for one in self.connections if isinstance(one, DeadlineProtocol) and one is not self
        ]
        slowest = max(others, key=lambda one: one._lag_s, default=self)
        if idle := [one for one in others if one._is_idle()]:
            min(idle, key=lambda one: one._header_since).transport.close()
        elif slowest._lag_s >= LAG_FULL_S:
            slowest._socket.abort()
            # The event loop does it later; of several new connections, each needs another place.
            self.connections.discard(slowest)
        else:
            reason = "Too many connections; try again in a moment."
            self._refuse(ApiError("Service unavailable", reason))

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless an answer is under way, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body, status = msgspec.json.encode(error.body), HTTPStatus(error.body.code)
            number = secrets.token_hex(16)
            LOG.info("%s %s %d", number, error, status)
            head = {
                "X-Global-Transaction-Id": number,
                **error.headers,
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                "Connection": "close",
            }
            lines = [f"HTTP/1.1 {status} {status.phrase}", *map(": ".join, head.items()), "", ""]
            self.transport.write("\r\n".join(lines).encode() + body)
        self.transport.close()


def with_limit(connections: int) -> type[DeadlineProtocol]:
    """The protocol, for at most so many connections at once."""
    return type("LimitedProtocol", (DeadlineProtocol,), {"limit": connections})
