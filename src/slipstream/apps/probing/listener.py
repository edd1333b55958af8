"""The listener: answers a prober with the arrival time of each packet of its streams."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from slipstream.apps.probing.packets import (
    HEAD_NBYTES,
    LARGEST_NBYTES,
    LOOPBACK,
    MOST_PACKETS,
    NONCE_NBYTES,
    PAGE_PACKETS,
    PORT,
    Kind,
    Packet,
    genuine,
    greeting_key,
    is_loopback,
    open_socket,
    parse,
    resolve,
    session_key,
)
from slipstream.errors import LaunchError, SecretError

MOST_SESSIONS = 64
SESSION_S = 60.0
# Python does not have this constant yet; these kernels agree on it.
_SO_TIMESTAMPNS = 35 if sys.platform == "linux" and struct.calcsize("l") == 8 else None
_TIMESPEC = struct.Struct("@ll")


@dataclass(slots=True)
class Counts:
    """The numbers of packets and bytes that a listener has received and sent."""

    sessions: int = 0
    streams: int = 0
    packets: int = 0
    untracked: int = 0  # no session of that name, or the wrong tag
    malformed: int = 0  # not one of our packets, or not valid in its session
    turned_away: int = 0  # too many sessions
    received_nbytes: int = 0
    sent_nbytes: int = 0


@dataclass(slots=True)
class _Session:
    key: bytes
    answer: bytes
    heard_s: float
    stream: int
    arrivals: array[int]


class Reception:
    """The listener's state, which takes datagrams and returns answers. No I/O, no clock."""

    def __init__(self, secret: bytes | None) -> None:
        self.counts = Counts()
        self._greeting = greeting_key(secret)
        self._sessions: dict[bytes, _Session] = {}

    def take(self, datagram: bytes, arrived_ns: int, now_s: float) -> bytes | None:
        """Handle a datagram; ``arrived_ns`` is of any monotonic clock, and never 0."""
        self.counts.received_nbytes += len(datagram)
        answer = self._answer(datagram, arrived_ns, now_s)
        if answer is not None:
            self.counts.sent_nbytes += len(answer)
        return answer

    def _answer(self, datagram: bytes, arrived_ns: int, now_s: float) -> bytes | None:
        packet = parse(datagram)
        if packet is None:
            self.counts.malformed += 1
            return None
        session = self._sessions.get(packet.session)
        if packet.kind is Kind.HELLO and genuine(datagram, self._greeting):
            return self._welcome(packet, session, len(datagram), now_s)
        if session is None or not genuine(datagram, session.key):
            self.counts.untracked += 1
            return None
        session.heard_s = now_s
        self.counts.packets += 1
        if packet.kind is Kind.PROBE and self._record_packet(session, packet, arrived_ns):
            return None
        if packet.kind is Kind.ASK and _reportable(session, packet, len(datagram)):
            return _report(session, packet)
        self.counts.malformed += packet.kind is not Kind.FILL
        return None

    def _welcome(
        self, packet: Packet, session: _Session | None, nbytes: int, now_s: float
    ) -> bytes | None:
        """Open a session for a HELLO; a repeated HELLO gets the same answer."""
        if nbytes < HEAD_NBYTES + NONCE_NBYTES:
            self.counts.malformed += 1
            return None
        if session is None:
            self._forget(now_s)
            if len(self._sessions) >= MOST_SESSIONS:
                self.counts.turned_away += 1
                return None
            answer = secrets.token_bytes(NONCE_NBYTES)
            key = session_key(self._greeting, packet.session, answer)
            session = _Session(key, answer, now_s, 0, array("Q"))
            self._sessions[packet.session] = session
            self.counts.sessions += 1
        return Packet(Kind.WELCOME, packet.session).sealed(self._greeting, session.answer)

    def _forget(self, now_s: float) -> None:
        silent = [k for k, s in self._sessions.items() if now_s - s.heard_s > SESSION_S]
        for nonce in silent:
            del self._sessions[nonce]

    def _record_packet(self, session: _Session, packet: Packet, arrived_ns: int) -> bool:
        """Record a packet; a late one of an earlier stream of the session is ignored."""
        if not packet.index < packet.count <= MOST_PACKETS or packet.stream < session.stream:
            return False
        if packet.stream > session.stream:
            session.stream = packet.stream
            session.arrivals = array("Q", bytes(8 * packet.count))
            self.counts.streams += 1
        if packet.count != len(session.arrivals):
            return False
        if not session.arrivals[packet.index]:
            session.arrivals[packet.index] = arrived_ns
        return True


def _reportable(session: _Session, packet: Packet, nbytes: int) -> bool:
    """Return whether to report; of a stream that was lost completely, nothing has arrived."""
    lost = packet.stream > session.stream
    current = packet.stream == session.stream and packet.count == len(session.arrivals)
    return (
        (lost or current)
        and packet.index * PAGE_PACKETS < packet.count <= MOST_PACKETS
        and nbytes == LARGEST_NBYTES
    )


def _report(session: _Session, packet: Packet) -> bytes:
    first = packet.index * PAGE_PACKETS
    known = session.arrivals if packet.stream == session.stream else array("Q")
    page = known[first : first + PAGE_PACKETS]
    body = struct.pack(f">{len(page)}Q", *page).ljust(8 * PAGE_PACKETS, b"\0")
    return replace(packet, kind=Kind.REPORT).sealed(session.key, body)


class Listener:
    """A thread that answers probers for as long as the block runs.

        with Listener("10.0.0.7", secret=secret) as listener:
            ...  # a job
            listener.counts.streams

    The kernel timestamps arrivals if it can, since the thread may be late.
    """

    def __init__(
        self, address: str = LOOPBACK, port: int = PORT, secret: bytes | None = None
    ) -> None:
        self._family, self._where = resolve(address, port)
        if not secret and not is_loopback(self._where):
            raise SecretError(
                f"listening on {address} lets other hosts in: set SLIPSTREAM_SECRET to the same "
                "random text on both, or name a file that holds it with --secret-file"
            )
        self.address, self.port = address, port
        self._reception = Reception(secret)
        self._stopped = threading.Event()

    @property
    def counts(self) -> Counts:
        return self._reception.counts

    def __enter__(self) -> Self:
        self._socket = open_socket(self._family)
        try:
            self._socket.bind(self._where)
        except OSError as error:
            self._socket.close()
            raise LaunchError(
                f"cannot listen on {self.address}, UDP port {self.port}: {error.strerror}; choose "
                "another"
            ) from error
        self.address, self.port = self._socket.getsockname()[:2]  # port 0 became a free one
        self._stamped = _stamp_arrivals(self._socket)
        self._thread = threading.Thread(target=self._serve, name="probe-listener", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        self._socket.settimeout(0.1)
        while not self._stopped.is_set():
            try:
                # One byte more than the largest packet, so that a larger one is detected.
                received = self._socket.recvmsg(LARGEST_NBYTES + 1, 64)
            except (TimeoutError, ConnectionError):
                continue
            datagram, notes, _, sender = received
            stamp = _stamp(notes) if self._stamped else time.monotonic_ns()
            answer = self._reception.take(datagram, stamp, time.monotonic())
            if answer is not None:
                with contextlib.suppress(OSError):
                    self._socket.sendto(answer, sender)


def _stamp_arrivals(into: socket.socket) -> bool:
    if _SO_TIMESTAMPNS is None:
        return False
    try:
        into.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


def _stamp(notes: Sequence[tuple[int, int, bytes]]) -> int:
    """Return a packet's timestamp; 0 (not arrived) without one: clocks must not mix."""
    for level, kind, content in notes:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = _TIMESPEC.unpack_from(content)
            return int(seconds) * 1_000_000_000 + int(nanoseconds)
    return 0
