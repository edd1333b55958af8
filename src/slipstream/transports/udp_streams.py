"""Streams of UDP packets that measure what a path has free: who sends them, and who answers.

    prober                                   listener
    HELLO  nonce                 ─────────▶
                                 ◀─────────  WELCOME  nonce of its own
    FILL … PROBE 0 … PROBE K−1   ─────────▶  notes when each arrived
    ASK page p                   ─────────▶
                                 ◀─────────  REPORT  arrival times of 168 packets

A packet is a header, a tag and padding. The tag is an HMAC of the header, and of the body where
there is one, with a key that follows from the secret and both nonces; whatever does not carry the
right one is counted and gets no answer. An answer is never larger than its question, which is
padded, so nobody can use a listener to flood somebody else.

Rates and sizes count whole frames: Ethernet, IP and UDP headers, and the payload.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import math
import secrets
import socket
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from statistics import median
from typing import Any, Self

from slipstream.errors import ConfigError, LaunchError, SecretError, WaitLimit
from slipstream.planning.bandwidth import (
    Available,
    Knee,
    Search,
    Trend,
    Verdict,
    after,
    decided,
    knee,
    next_rate,
    trend,
    vote,
)
from slipstream.transports.credentials import Credentials
from slipstream.units import human_bytes

LOOPBACK = "127.0.0.1"
PORT = 7998

_HEADER = struct.Struct(">5sB2x16sIII")
_MAGIC = b"slps\x01"  # the last byte is the version
_TAG_NBYTES = 16
_NONCE_NBYTES = 16
HEAD_NBYTES = _HEADER.size + _TAG_NBYTES
LARGEST_NBYTES = 1400  # leaves room for tunnels in a frame of 1500
PAGE_PACKETS = (LARGEST_NBYTES - HEAD_NBYTES) // 8
MOST_PACKETS = 1024
MOST_SESSIONS = 64
SESSION_S = 60.0

# Where a kernel buffer is full, packets are lost that the path would have carried. 4 MiB hold
# MOST_PACKETS even if every packet takes a page.
_BUFFER_NBYTES = 4 << 20
# As many bytes at any rate: other people's bursts, too, take less time on a faster link. Shorter
# streams would drown in what an operating system does to packets, longer ones try one's patience.
STREAM_NBYTES = 500_000
SHORTEST_STREAM_S = 0.01
LONGEST_STREAM_S = 0.5
FEWEST_PACKETS = 100  # ten groups of ten
ASK_AGAIN_S = 0.25
# A sleep may end this late; the rest of a gap is spun away.
_OVERSLEEP_NS = 200_000
# A packet that left later than this, and than a gap, says nothing: while a sender is held up its
# queue drains, and what it then sends at once waits for nobody but itself. Once it has caught up,
# the queue is what it would have been.
_TOLERABLE_LAG_S = 100e-6
# Trains double until one tells the path's rate. Between them a bucket fills up again.
_SHORTEST_TRAIN = 64
_SHORTEST_REST_S = 0.25
_LONGEST_REST_S = 2.0
# Of the speed at which packets leave when nothing waits, what is left for keeping a schedule.
_PACEABLE = 0.8
# What is free is no more than a train's own rate; it is measured with some error.
_ABOVE_TRAIN = 1.25
# More than the bucket that was seen: what is too much only makes a queue that drains.
_OVERFILL = 1.25
# How often a stream is sent, on average over a fleet, before it is given up.
_MOST_ATTEMPTS = 3
LEAST_TRAFFIC_NBYTES = 10_000_000
# The constant is in no Python yet; these kernels agree on it.
_SO_TIMESTAMPNS = 35 if sys.platform == "linux" and struct.calcsize("l") == 8 else None
_TIMESPEC = struct.Struct("@ll")


class Kind(IntEnum):
    """What a packet is, in the order of the drawing above."""

    HELLO = 1
    WELCOME = 2
    FILL = 3
    PROBE = 4
    ASK = 5
    REPORT = 6


_KINDS = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class Packet:
    """A header. ``index`` is a probe's place in its stream of ``count``, or a page's number."""

    kind: Kind
    session: bytes
    stream: int = 0
    index: int = 0
    count: int = 0

    def sealed(self, key: bytes, body: bytes = b"", *, padded_to: int = 0) -> bytes:
        head = _HEADER.pack(_MAGIC, self.kind, self.session, self.stream, self.index, self.count)
        return (head + _tag(key, head + body) + body).ljust(padded_to, b"\0")


def parse(datagram: bytes) -> Packet | None:
    """The header of anything that could be a packet of ours; whose it is, the tag tells."""
    if not HEAD_NBYTES <= len(datagram) <= LARGEST_NBYTES:
        return None
    magic, kind, session, stream, index, count = _HEADER.unpack_from(datagram)
    if magic != _MAGIC or kind not in _KINDS:
        return None
    return Packet(Kind(kind), session, stream, index, count)


def genuine(datagram: bytes, key: bytes, body_nbytes: int = 0) -> bool:
    """Whether the tag is that of whoever knows the key."""
    body = datagram[HEAD_NBYTES : HEAD_NBYTES + body_nbytes]
    said = datagram[_HEADER.size : HEAD_NBYTES]
    return hmac.compare_digest(_tag(key, datagram[: _HEADER.size] + body), said)


def greeting_key(secret: bytes | None) -> bytes:
    """Without a secret, which only loopback allows, it keeps out accidents and nobody else."""
    return Credentials(secret or b"", "probe", encrypt=False).derive("greeting")


def session_key(greeting: bytes, nonce: bytes, answer: bytes) -> bytes:
    return hmac.digest(greeting, nonce + answer, "sha256")


def _tag(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")[:_TAG_NBYTES]


# ---- the one who answers


@dataclass(slots=True)
class Counts:
    """What a listener has seen."""

    sessions: int = 0
    streams: int = 0
    packets: int = 0
    strangers: int = 0  # no session of that name, or the wrong tag
    malformed: int = 0  # no packet of ours, or one that does not fit what went before
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
    """What the listener knows; it is handed datagrams and says what to answer. No I/O, no clock."""

    def __init__(self, secret: bytes | None) -> None:
        self.counts = Counts()
        self._greeting = greeting_key(secret)
        self._sessions: dict[bytes, _Session] = {}

    def take(self, datagram: bytes, arrived_ns: int, now_s: float) -> bytes | None:
        """``arrived_ns`` on any clock that runs on; never 0, which means "did not arrive"."""
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
            self.counts.strangers += 1
            return None
        session.heard_s = now_s
        self.counts.packets += 1
        if packet.kind is Kind.PROBE and self._noted(session, packet, arrived_ns):
            return None
        if packet.kind is Kind.ASK and _reportable(session, packet, len(datagram)):
            return _report(session, packet)
        self.counts.malformed += packet.kind is not Kind.FILL
        return None

    def _welcome(
        self, packet: Packet, session: _Session | None, nbytes: int, now_s: float
    ) -> bytes | None:
        """The same answer to a HELLO that comes twice."""
        if nbytes < HEAD_NBYTES + _NONCE_NBYTES:
            self.counts.malformed += 1
            return None
        if session is None:
            self._forget(now_s)
            if len(self._sessions) >= MOST_SESSIONS:
                self.counts.turned_away += 1
                return None
            answer = secrets.token_bytes(_NONCE_NBYTES)
            key = session_key(self._greeting, packet.session, answer)
            session = _Session(key, answer, now_s, 0, array("Q"))
            self._sessions[packet.session] = session
            self.counts.sessions += 1
        return Packet(Kind.WELCOME, packet.session).sealed(self._greeting, session.answer)

    def _forget(self, now_s: float) -> None:
        silent = [k for k, s in self._sessions.items() if now_s - s.heard_s > SESSION_S]
        for nonce in silent:
            del self._sessions[nonce]

    def _noted(self, session: _Session, packet: Packet, arrived_ns: int) -> bool:
        """A session has one stream at a time; a straggler of an earlier one is too late."""
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
    """Of a stream that was lost as a whole, all that can be said is that nothing came."""
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
    """Answers probers in a thread of its own, for as long as the block runs.

        with Listener("10.0.0.7", secret=secret) as listener:
            ...  # a job
            listener.counts.streams

    Arrivals are stamped by the kernel where it does that: the thread may then be late.
    """

    def __init__(
        self, address: str = LOOPBACK, port: int = PORT, secret: bytes | None = None
    ) -> None:
        self._family, self._where = _resolve(address, port)
        if not secret and not _is_loopback(self._where):
            raise SecretError(
                f"listening on {address} lets other hosts in: set SLIPSTREAM_SECRET to the same "
                "random text on both, or name a file that holds it with --secret-file"
            )
        self.address, self.port = address, port
        self._reception = Reception(secret)
        self._over = threading.Event()

    @property
    def counts(self) -> Counts:
        return self._reception.counts

    def __enter__(self) -> Self:
        self._socket = _socket(self._family)
        try:
            self._socket.bind(self._where)
        except OSError as error:
            self._socket.close()
            raise LaunchError(
                f"cannot listen on {self.address}, UDP port {self.port}: {error.strerror}; choose "
                "another"
            ) from error
        self.address, self.port = self._socket.getsockname()[:2]  # 0 became a free one
        self._stamped = _stamp_arrivals(self._socket)
        self._thread = threading.Thread(target=self._serve, name="probe-listener", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        self._socket.settimeout(0.1)
        while not self._over.is_set():
            try:
                # One byte more than the largest, so that one which is too large shows.
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
    """0, as if it had not arrived, for a packet without a stamp: clocks must not be mixed."""
    for level, kind, content in notes:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = _TIMESPEC.unpack_from(content)
            return int(seconds) * 1_000_000_000 + int(nanoseconds)
    return 0


# ---- the one who asks


@dataclass(frozen=True, slots=True)
class Shape:
    """So many packets of so many bytes, frame headers included, one every ``gap_ns``."""

    packets: int
    frame_nbytes: int
    gap_ns: float

    @property
    def nbytes(self) -> int:
        return self.packets * self.frame_nbytes

    @property
    def seconds(self) -> float:
        return self.packets * self.gap_ns / 1e9


@dataclass(frozen=True, slots=True)
class Flight:
    """When a stream's packets were due and sent, and when they arrived by another clock."""

    shape: Shape
    sent_s: list[float]
    arrived_s: list[float | None]

    @property
    def usual_gap_s(self) -> float:
        return median(b - a for a, b in pairwise(self.sent_s))

    @property
    def sent_bytes_s(self) -> float:
        """The speed at which packets left while nothing held them up."""
        return self.shape.frame_nbytes / max(self.usual_gap_s, 1e-9)

    @property
    def unbroken(self) -> bool:
        """Whether the sender was never held up for long."""
        longest_s = max(b - a for a, b in pairwise(self.sent_s))
        return longest_s <= max(_TOLERABLE_LAG_S, 20 * self.usual_gap_s)

    def trend(self) -> Trend | None:
        """Of the packets that left in time; None if those are less than a quarter."""
        tolerable_s = max(_TOLERABLE_LAG_S, self.shape.gap_ns / 1e9)
        in_time = [
            (sent, arrived)
            for index, (sent, arrived) in enumerate(zip(self.sent_s, self.arrived_s, strict=True))
            if sent - index * self.shape.gap_ns / 1e9 <= tolerable_s
        ]
        if 4 * len(in_time) < len(self.sent_s):
            return None
        return trend([sent for sent, _ in in_time], [arrived for _, arrived in in_time])


class Streams:
    """A session with a listener: streams of any shape go there, arrival times come back."""

    def __init__(
        self, host: str, port: int = PORT, secret: bytes | None = None, answer_limit_s: float = 5.0
    ) -> None:
        self._family, self._where = _resolve(host, port)
        if not secret and not _is_loopback(self._where):
            raise SecretError(
                f"{host} is another host: set SLIPSTREAM_SECRET to the text that its listener has, "
                "or name a file that holds it with --secret-file"
            )
        self.sent_nbytes = 0
        self.headers_nbytes = 42 if self._family == socket.AF_INET else 62
        self._peer = f"{host}:{port}"
        self._limit_s = answer_limit_s
        self._greeting = greeting_key(secret)
        self._nonce = secrets.token_bytes(_NONCE_NBYTES)
        self._key = b""
        self._stream = 0

    def __enter__(self) -> Self:
        self._socket = _socket(self._family)
        try:
            self._socket.connect(self._where)
            self._greet()
        except OSError as error:
            self._socket.close()
            raise LaunchError(f"no way to {self._peer}: {error.strerror}") from error
        except BaseException:
            self._socket.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def largest_frame_nbytes(self) -> int:
        return LARGEST_NBYTES + self.headers_nbytes

    def shape(self, bytes_s: float) -> Shape:
        """A stream at this rate, of packets that are smaller where they would be too few."""
        wanted = bytes_s * min(max(STREAM_NBYTES / bytes_s, SHORTEST_STREAM_S), LONGEST_STREAM_S)
        least = HEAD_NBYTES + self.headers_nbytes
        frame = min(max(int(wanted / FEWEST_PACKETS), least), self.largest_frame_nbytes)
        packets = min(max(round(wanted / frame), FEWEST_PACKETS), MOST_PACKETS)
        return Shape(packets, frame, frame / bytes_s * 1e9)

    def cost_nbytes(self, shape: Shape, fill: int) -> int:
        """All that ``send`` sends, if no question has to be repeated."""
        pages = -(-shape.packets // PAGE_PACKETS)
        return shape.nbytes + (fill + pages) * self.largest_frame_nbytes

    def send(self, shape: Shape, fill: int = 0) -> Flight:
        """One stream, after ``fill`` large packets as fast as they go."""
        self._stream += 1
        payload = shape.frame_nbytes - self.headers_nbytes
        packets = [
            Packet(Kind.PROBE, self._nonce, self._stream, index, shape.packets).sealed(
                self._key, padded_to=payload
            )
            for index in range(shape.packets)
        ]
        self._fill(fill)
        sent_s = self._pace(packets, shape.gap_ns)
        arrivals = self._collect(shape.packets)
        # Before they become floats: nanoseconds since 1970 do not fit into one.
        first = next((at for at in arrivals if at), 0)
        arrived_s = [(at - first) / 1e9 if at else None for at in arrivals]
        return Flight(shape, sent_s, arrived_s)

    def _greet(self) -> None:
        hello = Packet(Kind.HELLO, self._nonce).sealed(
            self._greeting, padded_to=HEAD_NBYTES + _NONCE_NBYTES
        )
        for datagram in self._answers(lambda: [hello], "`slipstream probe --listen` to answer"):
            packet = parse(datagram)
            if (
                packet == Packet(Kind.WELCOME, self._nonce)
                and len(datagram) == HEAD_NBYTES + _NONCE_NBYTES
                and genuine(datagram, self._greeting, _NONCE_NBYTES)
            ):
                self._key = session_key(self._greeting, self._nonce, datagram[HEAD_NBYTES:])
                return

    def _fill(self, count: int) -> None:
        packet = Packet(Kind.FILL, self._nonce).sealed(self._key, padded_to=LARGEST_NBYTES)
        self._socket.setblocking(False)
        for _ in range(count):
            self._transmit(packet)

    def _pace(self, packets: Sequence[bytes], gap_ns: float) -> list[float]:
        """Sends by a schedule, and catches up when held up; seconds since its beginning."""
        sent_s = []
        self._socket.setblocking(False)
        begun_ns = time.monotonic_ns()
        for index, packet in enumerate(packets):
            now_ns = _wait_until(begun_ns + int(index * gap_ns))
            self._transmit(packet)
            sent_s.append((now_ns - begun_ns) / 1e9)
        return sent_s

    def _transmit(self, packet: bytes) -> None:
        """What the kernel does not take is lost, as on a path that is full."""
        try:
            self._socket.send(packet)
        except OSError:
            return
        self.sent_nbytes += len(packet) + self.headers_nbytes

    def _collect(self, count: int) -> list[int]:
        """Arrival times, by packet; 0 for what did not arrive."""
        pages: dict[int, tuple[int, ...]] = {}
        wanted = range(-(-count // PAGE_PACKETS))

        def ask() -> list[bytes]:
            missing = [
                Packet(Kind.ASK, self._nonce, self._stream, page, count)
                for page in wanted
                if page not in pages
            ]
            return [packet.sealed(self._key, padded_to=LARGEST_NBYTES) for packet in missing]

        for datagram in self._answers(ask, f"arrival times of stream {self._stream}"):
            packet = parse(datagram)
            if packet is None or len(datagram) != HEAD_NBYTES + 8 * PAGE_PACKETS:
                continue
            expected = Packet(Kind.REPORT, self._nonce, self._stream, packet.index, count)
            if packet != expected or not genuine(datagram, self._key, 8 * PAGE_PACKETS):
                continue
            pages[packet.index] = struct.unpack_from(f">{PAGE_PACKETS}Q", datagram, HEAD_NBYTES)
            if len(pages) == len(wanted):
                break
        return [at for page in wanted for at in pages[page]][:count]

    def _answers(self, ask: Callable[[], list[bytes]], what: str) -> Iterator[bytes]:
        """Whatever comes back, asking again and again; a limit ends it."""
        until_s = time.monotonic() + self._limit_s
        while (now_s := time.monotonic()) < until_s:
            self._socket.setblocking(False)
            for question in ask():
                self._transmit(question)
            again_s = min(until_s, now_s + ASK_AGAIN_S)
            while (left_s := again_s - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                try:
                    yield self._socket.recv(LARGEST_NBYTES + 1)
                except TimeoutError:
                    break
                except ConnectionRefusedError:
                    pass  # nobody has the port, yet
        raise WaitLimit(what, self._limit_s, [self._peer])


def _wait_until(due_ns: int) -> int:
    """Sleeps where a gap is long enough for that; the time at which it returned."""
    ahead_ns = due_ns - time.monotonic_ns()
    if ahead_ns > 2 * _OVERSLEEP_NS:
        time.sleep((ahead_ns - _OVERSLEEP_NS) / 1e9)
    while (now_ns := time.monotonic_ns()) < due_ns:
        pass
    return now_ns


def _resolve(host: str, port: int) -> tuple[int, Any]:
    if not 0 <= port <= 65535:
        raise LaunchError(f"port {port}: give one from 0 to 65535")
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise LaunchError(f"no host {host!r}: {error.strerror}; give a name or address") from error
    return family, where


def _is_loopback(where: tuple[Any, ...]) -> bool:
    return ipaddress.ip_address(where[0].partition("%")[0]).is_loopback


def _socket(family: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_DGRAM)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        made.setsockopt(socket.SOL_SOCKET, option, _BUFFER_NBYTES)
    return made


# ---- a whole measurement


class _Spent(Exception):
    """What a measurement was allowed is used up; it ends with what it knows."""


@dataclass(slots=True)
class _Allowance:
    """What a measurement may still send, and until when; and the streams it has sent."""

    streams: Streams
    at_most_nbytes: int
    until_s: float
    flown: int = 0
    late: int = 0

    def send(self, shape: Shape, fill: int = 0) -> Flight:
        cost_nbytes = self.streams.cost_nbytes(shape, fill)
        if self.streams.sent_nbytes + cost_nbytes > self.at_most_nbytes:
            raise _Spent("traffic")
        if time.monotonic() + shape.seconds > self.until_s:
            raise _Spent("time")
        return self.streams.send(shape, fill)

    def send_stream(self, shape: Shape, fill: int) -> Trend | None:
        found = self.send(shape, fill).trend()
        self.flown += 1
        self.late += found is None
        return found


def measure(
    host: str,
    port: int = PORT,
    secret: bytes | None = None,
    *,
    least_bytes_s: float = 125e3,
    most_bytes_s: float = 125e6,
    resolution: float = 0.1,
    fleet: int = 8,
    at_most_nbytes: int = 200_000_000,
    limit_s: float = 60.0,
    answer_limit_s: float = 5.0,
) -> Available:
    """What the path from here to a listener has free, in bytes/s.

    It ends when the range is within ``resolution`` of its upper end, or when ``at_most_nbytes``
    have been sent or ``limit_s`` are over: ``Available.ended`` says which. Rates below
    ``least_bytes_s``, above ``most_bytes_s`` and above what this machine can pace are not tried.
    """
    if at_most_nbytes < LEAST_TRAFFIC_NBYTES:
        raise ConfigError(
            f"at most {human_bytes(at_most_nbytes)}: a measurement takes "
            f"{human_bytes(LEAST_TRAFFIC_NBYTES)} at the least, and up to five times that as a rule"
        )
    if fleet < 1:
        raise ConfigError(f"fleet={fleet}: one stream at least has to be sent")
    limits = Search(least_bytes_s, most_bytes_s, resolution)
    begun_s = time.monotonic()
    with Streams(host, port, secret, answer_limit_s) as streams:
        allowance = _Allowance(streams, at_most_nbytes, begun_s + limit_s)
        try:
            path = _send_trains(allowance)
        except _Spent:
            raise WaitLimit("a path's rate to be seen", limit_s, [f"{host}:{port}"]) from None
        search, ended = _bisect(allowance, path.within(limits), path, fleet)
        return Available(
            search.low if search.low_seen else 0.0,
            search.high,
            low_seen=search.low_seen,
            high_seen=search.high_seen,
            ended=ended,
            fleets=search.fleets,
            streams=allowance.flown,
            late_streams=allowance.late,
            sent_nbytes=streams.sent_nbytes,
            seconds=time.monotonic() - begun_s,
            fastest_bytes_s=path.fastest_bytes_s,
            burst_nbytes=path.burst_nbytes,
        )


@dataclass(frozen=True, slots=True)
class _Path:
    """What trains showed: how fast packets can leave here, and what the path does to them."""

    fastest_bytes_s: float
    seen: Knee | None  # None if they arrived as fast as they left, or not at all

    @property
    def burst_nbytes(self) -> int:
        return 0 if self.seen is None else self.seen.burst_nbytes

    def within(self, limits: Search) -> Search:
        high = min(limits.high, self.fastest_bytes_s)
        if self.seen is not None:
            high = min(high, _ABOVE_TRAIN * self.seen.rate_bytes_s)
        return replace(limits, low=min(limits.low, high / 2), high=high)


def _bisect(allowance: _Allowance, search: Search, path: _Path, fleet: int) -> tuple[Search, str]:
    """The search at its end, and why it ended."""
    streams = allowance.streams
    fill = math.ceil(_OVERFILL * path.burst_nbytes / streams.largest_frame_nbytes)
    try:
        while (rate := next_rate(search)) is not None:
            search = after(search, _send_fleet(allowance, streams.shape(rate), fill, fleet))
    except _Spent as limit:
        return search, str(limit)
    return search, "fleets" if search.fleets == search.most_fleets else "resolution"


def _send_trains(allowance: _Allowance) -> _Path:
    """Packets as fast as they go, until a train is long enough to show the path's own rate.

    Only a train that follows one which showed the rate had a rest that surely filled the bucket.
    """
    frame = allowance.streams.largest_frame_nbytes
    packets, fastest_bytes_s, before = _SHORTEST_TRAIN, 0.0, None
    while True:
        flight = _send_train(allowance, Shape(packets, frame, 0.0))
        fastest_bytes_s = max(fastest_bytes_s, _PACEABLE * flight.sent_bytes_s)
        seen = knee(flight.arrived_s, frame)
        if seen is not None and seen.rate_bytes_s >= _PACEABLE * flight.sent_bytes_s:
            seen = None
        clear = seen is not None and seen.clear
        if clear and before is not None:
            break
        packets *= 1 if clear else 2
        if packets > MOST_PACKETS:
            break
        rest_s = 0.0 if seen is None else 4 * seen.train_nbytes / seen.rate_bytes_s
        time.sleep(min(max(rest_s, _SHORTEST_REST_S), _LONGEST_REST_S))
        before = seen
    return _Path(fastest_bytes_s, seen)


def _send_train(allowance: _Allowance, shape: Shape) -> Flight:
    """While a sender is held up, the bucket fills: such a train would show one that is larger."""
    for _ in range(_MOST_ATTEMPTS):
        flight = allowance.send(shape)
        if flight.unbroken:
            break
        time.sleep(_SHORTEST_REST_S)
    return flight


def _send_fleet(allowance: _Allowance, shape: Shape, fill: int, fleet: int) -> Verdict:
    """Streams until the vote is decided, each followed by a rest of its own length.

    One that this machine was too busy to send in time is sent again, within limits.
    """
    trends: list[Trend] = []
    for _ in range(_MOST_ATTEMPTS * fleet):
        if decided(trends, fleet):
            break
        found = allowance.send_stream(shape, fill)
        if found is not None:
            trends.append(found)
        time.sleep(shape.seconds)
    return vote([*trends, *[Trend.AMBIGUOUS] * (fleet - len(trends))])
