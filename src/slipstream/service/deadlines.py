"""Connections with deadlines, which uvicorn does not have.

A connection that sends nothing, half a request or a byte now and then would stay open for ever. A
header has to be complete within 10 s. A body has to come at 16 KiB/s after its first 10 s.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from slipstream.service.errors import ApiError, unavailable

HEADER_S: Final = 10.0
HEADER_NBYTES: Final = 32 * 1024
HEADER_STEP_NBYTES: Final = 8 * 1024
BODY_GRACE_S: Final = 10.0
BODY_NBYTES_S: Final = 16 * 1024


def is_too_slow(received_nbytes: int, elapsed_s: float) -> bool:
    """Whether a body comes too slowly.

    >>> is_too_slow(0, 9.0), is_too_slow(1024, 11.0), is_too_slow(1 << 20, 60.0)
    (False, True, False)
    """
    return elapsed_s > BODY_GRACE_S and received_nbytes < BODY_NBYTES_S * (elapsed_s - BODY_GRACE_S)


class DeadlineProtocol(H11Protocol):
    """Answers 408 to a request that does not come in time, and closes."""

    limit = 512
    _timer: asyncio.TimerHandle | None = None
    _began = 0.0
    _received = 0
    _silent_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_header()
        if len(self.connections) > self.limit:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._timer is None and self.conn.their_state is h11.IDLE:
            self._expect_header()  # the next request on this connection
        was_idle = self.conn.their_state is h11.IDLE
        while was_idle and len(data) > HEADER_STEP_NBYTES and self.conn.their_state is h11.IDLE:
            # h11 looks at the size of a header only while it is incomplete.
            super().data_received(data[:HEADER_STEP_NBYTES])
            data = data[HEADER_STEP_NBYTES:]
        if self.conn.their_state is not h11.ERROR:
            super().data_received(data)
        if self.transport.is_closing():
            self._cancel()
        elif self.conn.their_state is h11.SEND_BODY:
            if was_idle:
                self._expect_body()
        elif self.conn.their_state is not h11.IDLE:
            self._cancel()  # the request is complete

    def _make_room(self) -> None:
        """Close the connection that has waited longest without a request; else this one."""
        silent = [
            one
            for one in self.connections
            if isinstance(one, DeadlineProtocol)
            and one is not self
            and one.conn.their_state is h11.IDLE
            and not one.transport.is_closing()
        ]
        if silent:
            min(silent, key=lambda one: one._silent_since).transport.close()
            return
        self._send(unavailable("Too many connections; try again in a moment."))
        self.transport.close()

    def _expect_header(self) -> None:
        self._silent_since = self.loop.time()
        self._cancel()
        self._timer = self.loop.call_later(HEADER_S, self._expire)

    def _expect_body(self) -> None:
        self._cancel()
        self._began, self._received = self.loop.time(), 0
        self._timer = self.loop.call_later(1.0, self._check_body)

    def _check_body(self) -> None:
        self._timer = None
        if self.transport.is_closing() or self.conn.their_state is not h11.SEND_BODY:
            return
        if self.flow.read_paused:  # we are the slow ones
            self._began += 1.0
        if is_too_slow(self._received, self.loop.time() - self._began):
            self._expire()
        else:
            self._timer = self.loop.call_later(1.0, self._check_body)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send(
                ApiError(408, "Request timeout", "The request did not come in time; send it again.")
            )
        self.transport.close()

    def _send(self, error: ApiError) -> None:
        body = error.body()
        headers: list[Any] = [
            *error.headers.items(),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        reason = HTTPStatus(error.code).phrase.encode()
        events = [
            h11.Response(status_code=error.code, headers=headers, reason=reason),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        for event in events:
            self.transport.write(self.conn.send(event) or b"")


def with_limit(connections: int) -> type[DeadlineProtocol]:
    """The protocol, for at most so many connections at once.

    >>> with_limit(8).limit
    8
    """
    return type("LimitedProtocol", (DeadlineProtocol,), {"limit": connections})
