"""Connections with deadlines, which uvicorn does not have.

A connection that sends nothing, half a request or a byte now and then would stay open for ever. A
header has to be complete within 10 s. A body has to come at 16 KiB/s after its first 10 s.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from http import HTTPStatus
from typing import Final

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from slipstream.service.errors import ApiError

LOG = logging.getLogger("slipstream.service")
HEADER_S: Final = 10.0
HEADER_NBYTES: Final = 32 * 1024
HEADER_STEP_NBYTES: Final = 8 * 1024
BODY_GRACE_S: Final = 10.0
BODY_NBYTES_S: Final = 16 * 1024
CHECK_S: Final = 1.0


def is_too_slow(received_nbytes: int, elapsed_s: float) -> bool:
    """Whether a body comes too slowly.

    >>> is_too_slow(0, 9.0), is_too_slow(1024, 11.0), is_too_slow(1 << 20, 60.0)
    (False, True, False)
    """
    return elapsed_s > BODY_GRACE_S and received_nbytes < BODY_NBYTES_S * (elapsed_s - BODY_GRACE_S)


class DeadlineProtocol(H11Protocol):
    """Answers 408 to a request that does not come in time, and closes."""

    limit = 512  # connections at once
    _since: float | None = None  # when what is expected began: a header, or its body
    _header_since = 0.0  # when the last header began
    _received = 0  # of the body
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
        before = self.conn.their_state
        self._received += len(data)
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

    def _check(self) -> None:
        if self.transport.is_closing():
            return
        self._timer = self.loop.call_later(CHECK_S, self._check)
        if self._since is None:
            return
        if self.flow.read_paused:  # we are the slow ones
            self._since += CHECK_S
        elapsed_s = self.loop.time() - self._since
        in_header = self.conn.their_state is h11.IDLE
        if elapsed_s >= HEADER_S if in_header else is_too_slow(self._received, elapsed_s):
            reason = "The request did not come in time; send it again."
            self._refuse(ApiError("Request timeout", reason))

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
            min(silent, key=lambda one: one._header_since).transport.close()
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
