"""The sender of streams of UDP packets that measure available bandwidth."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from slipstream.apps.probing.packets import (
    HEAD_NBYTES,
    LARGEST_NBYTES,
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
from slipstream.errors import LaunchError, SecretError, WaitLimit

# The same number of bytes at any rate, since bursts of other traffic also take less time on a
# faster link. In shorter streams the operating system's delays would dominate; longer ones take too
# long.
STREAM_NBYTES = 500_000
SHORTEST_STREAM_S = 0.01
LONGEST_STREAM_S = 0.5
FEWEST_PACKETS = 100  # ten groups of ten
ASK_AGAIN_S = 0.25
# A sleep may end this late; the rest of a gap is spent in a busy loop.
_OVERSLEEP_NS = 200_000
# A packet that was sent later than this, and later than a gap, is ignored: while a sender is
# delayed its queue drains, and the packets that it then sends at once queue behind each other. Once
# it has caught up, the queue is as it would have been.
TOLERABLE_LAG_S = 100e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """``packets`` packets of ``frame_nbytes`` bytes, with frame headers, one every ``gap_ns``."""

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
    """The times at which a stream's packets were due and sent, and arrived by another clock."""

    shape: Shape
    sent_s: list[float]
    arrived_s: list[float | None]
    filled_s: float = 0.0  # the time it took to send the packets before

    @property
    def sent_bytes_s(self) -> float:
        """The mean speed at which packets were sent."""
        spent_s = max(self.sent_s[-1] - self.sent_s[0], 1e-9)
        return (len(self.sent_s) - 1) * self.shape.frame_nbytes / spent_s

    @property
    def unbroken(self) -> bool:
        """True if the sender was never delayed for a large part of the time."""
        longest_s = max(b - a for a, b in pairwise(self.sent_s))
        return longest_s <= max(TOLERABLE_LAG_S, 0.2 * (self.sent_s[-1] - self.sent_s[0]))


class Streams:
    """A session with a listener: sends streams of any shape, receives arrival times."""

    def __init__(
        self, host: str, port: int = PORT, secret: bytes | None = None, answer_limit_s: float = 5.0
    ) -> None:
        self._family, self._where = resolve(host, port)
        if not secret and not is_loopback(self._where):
            raise SecretError(
                f"{host} is another host: set SLIPSTREAM_SECRET to the text that its listener has, "
                "or name a file that holds it with --secret-file"
            )
        self.sent_nbytes = 0
        self.headers_nbytes = 42 if self._family == socket.AF_INET else 62
        self._peer = f"{host}:{port}"
        self._limit_s = answer_limit_s
        self._greeting = greeting_key(secret)
        self._nonce = secrets.token_bytes(NONCE_NBYTES)
        self._key = b""
        self._stream = 0

    def __enter__(self) -> Self:
        self._socket = open_socket(self._family)
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
        """Return a stream at this rate; packets are smaller where there would be too few."""
        wanted = bytes_s * min(max(STREAM_NBYTES / bytes_s, SHORTEST_STREAM_S), LONGEST_STREAM_S)
        least = HEAD_NBYTES + self.headers_nbytes
        frame = min(max(int(wanted / FEWEST_PACKETS), least), self.largest_frame_nbytes)
        packets = min(max(round(wanted / frame), FEWEST_PACKETS), MOST_PACKETS)
        return Shape(packets, frame, frame / bytes_s * 1e9)

    def cost_nbytes(self, shape: Shape, fill: int) -> int:
        """Return all bytes that ``send`` sends, if no request has to be repeated."""
        pages = -(-shape.packets // PAGE_PACKETS)
        return shape.nbytes + (fill + pages) * self.largest_frame_nbytes

    def send(self, shape: Shape, fill: int = 0) -> Flight:
        """Send one stream, after ``fill`` large packets as fast as possible."""
        self._stream += 1
        payload = shape.frame_nbytes - self.headers_nbytes
        packets = [
            Packet(Kind.PROBE, self._nonce, self._stream, index, shape.packets).sealed(
                self._key, padded_to=payload
            )
            for index in range(shape.packets)
        ]
        begun_s = time.monotonic()
        self._fill(fill)
        filled_s = time.monotonic() - begun_s
        sent_s = self._pace(packets, shape.gap_ns)
        arrivals = self._collect(shape.packets)
        # Subtract before converting to float, which cannot represent nanoseconds since 1970.
        first = next((at for at in arrivals if at), 0)
        arrived_s = [(at - first) / 1e9 if at else None for at in arrivals]
        return Flight(shape, sent_s, arrived_s, filled_s)

    def _greet(self) -> None:
        hello = Packet(Kind.HELLO, self._nonce).sealed(
            self._greeting, padded_to=HEAD_NBYTES + NONCE_NBYTES
        )
        for datagram in self._answers(lambda: [hello], "`slipstream probe --listen` to answer"):
            packet = parse(datagram)
            if (
                packet == Packet(Kind.WELCOME, self._nonce)
                and len(datagram) == HEAD_NBYTES + NONCE_NBYTES
                and genuine(datagram, self._greeting, NONCE_NBYTES)
            ):
                self._key = session_key(self._greeting, self._nonce, datagram[HEAD_NBYTES:])
                return

    def _fill(self, count: int) -> None:
        packet = Packet(Kind.FILL, self._nonce).sealed(self._key, padded_to=LARGEST_NBYTES)
        self._socket.setblocking(False)
        for _ in range(count):
            self._transmit(packet)

    def _pace(self, packets: Sequence[bytes], gap_ns: float) -> list[float]:
        """Send by a schedule, and catch up after a delay; return seconds since its start."""
        sent_s = []
        self._socket.setblocking(False)
        begun_ns = time.monotonic_ns()
        for index, packet in enumerate(packets):
            now_ns = _wait_until(begun_ns + int(index * gap_ns))
            self._transmit(packet)
            sent_s.append((now_ns - begun_ns) / 1e9)
        return sent_s

    def _transmit(self, packet: bytes) -> None:
        """Send a packet; one that the kernel does not take is lost, as on a full path."""
        try:
            self._socket.send(packet)
        except OSError:
            return
        self.sent_nbytes += len(packet) + self.headers_nbytes

    def _collect(self, count: int) -> list[int]:
        """Return arrival times by packet; 0 for a packet that did not arrive."""
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
        """Yield all answers; repeat the request until a limit."""
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
                    pass  # no listener at the port yet
        raise WaitLimit(what, self._limit_s, [self._peer])


def _wait_until(due_ns: int) -> int:
    """Sleep if a gap is long enough for that; return the time at its end."""
    ahead_ns = due_ns - time.monotonic_ns()
    if ahead_ns > 2 * _OVERSLEEP_NS:
        time.sleep((ahead_ns - _OVERSLEEP_NS) / 1e9)
    while (now_ns := time.monotonic_ns()) < due_ns:
        pass
    return now_ns
